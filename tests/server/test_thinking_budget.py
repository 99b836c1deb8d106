"""A thought's budget, with a model that thinks on until it is stopped, then answers."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.messages import GenerationRequest
from server.output_format import OutputFormat
from tests.server.http_client import app_of, chat, content, error_of, events
from tests.server.scripted_client import FakeEngine

THINKS = OutputFormat(reasons=True)
OPENS = "{{ messages[0].content }}{{ '<think>\n' }}"
CLOSING = b"\n</think>\n\n"


def thinker(request: GenerationRequest) -> list[int]:
    """Thinks sixty letters; with its thought ended for it, says how it began."""
    resumed = bytes(request.resumed_token_ids)
    if resumed:
        assert resumed.endswith(CLOSING)
        return list(b"so: " + resumed[:3])
    prompt = bytes(i for i in request.prompt_token_ids if i < 256)
    if prompt.endswith(CLOSING):
        return list(b"at once")
    is_open = prompt.endswith(b"<think>\n")
    return list((b"" if is_open else b"<think>") + b"abcdef" * 10 + b"</think>yes")


def ask(template: str | None = None, *, tokens_per_step: int = 1, **fields: Any) -> Any:
    model: dict[str, Any] = {} if template is None else {"template": template}
    engine = FakeEngine(thinker, tokens_per_step=tokens_per_step, cached_tokens=3)
    app = app_of(engine, output_format=THINKS, **model)
    whole = chat(app, **fields)
    chunks = events(chat(app, **fields, stream=True))
    (choice,) = whole.json()["choices"]
    assert content(chunks) == choice["message"]["content"]
    assert engine.running == set()
    return whole.json()


@pytest.mark.parametrize("tokens_per_step", [1, 4, 100])
@pytest.mark.parametrize(("template", "said"), [(OPENS, "abc"), (None, "<th")])
def test_a_thought_ends_when_its_budget_is_used_up(
    template: str | None, said: str, tokens_per_step: int
) -> None:
    answer = ask(template, tokens_per_step=tokens_per_step, thinking_budget=10, logprobs=True)
    (choice,) = answer["choices"]
    assert choice["message"]["reasoning_content"] == "abcdefabcd"
    assert (choice["message"]["content"], choice["finish_reason"]) == (f"so: {said}", "stop")
    assert len(choice["logprobs"]["content"]) == len(f"so: {said}")
    usage = answer["usage"]
    opening = 0 if template else len("<think>")
    thought = opening + 10 + len("\n</think>")
    assert thought <= usage["completion_tokens_details"]["reasoning_tokens"] <= thought + 2
    assert usage["completion_tokens"] == opening + 10 + len(CLOSING) + len("so: abc") + 1
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3


@pytest.mark.parametrize("budget", [60 + len("</think>"), 500])
def test_a_shorter_thought_is_left_alone(budget: int) -> None:
    message = ask(OPENS, thinking_budget=budget)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("abcdef" * 10, "yes")


def test_a_budget_of_zero_ends_the_thought_in_the_prompt_or_at_its_tag() -> None:
    message = ask(OPENS, thinking_budget=0)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "at once", "refusal": None}
    message = ask(thinking_budget=0)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "so: <th", "refusal": None}


@pytest.mark.parametrize("max_tokens", [8, 10, 14, 10 + len(CLOSING)])
def test_max_tokens_count_the_thought_and_its_forced_end(max_tokens: int) -> None:
    answer = ask(OPENS, thinking_budget=10, max_tokens=max_tokens)
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert answer["usage"]["completion_tokens"] == max_tokens


@pytest.mark.parametrize(
    ("effort", "length"), [("minimal", 128), ("low", 512), ("high", 3_000), (None, 3_000)]
)
def test_an_effort_is_a_number_of_tokens(effort: str | None, length: int) -> None:
    thought = b"a" * 3_000

    def script(request: GenerationRequest) -> list[int]:
        return list(b"!" if request.resumed_token_ids else thought + b"</think>!")

    engine = FakeEngine(script, tokens_per_step=500)
    engine.info = None
    app = app_of(engine, output_format=THINKS, template=OPENS, max_model_len=8_192)
    message = chat(app, reasoning_effort=effort).json()["choices"][0]["message"]
    assert (len(message["reasoning_content"]), message["content"]) == (length, "!")


def test_an_exact_budget_wins_over_an_effort() -> None:
    message = ask(OPENS, thinking_budget=3, reasoning_effort="high")["choices"][0]["message"]
    assert message["reasoning_content"] == "abc"


def test_a_model_that_does_not_reason_has_no_budget_and_ignores_effort() -> None:
    app = app_of(FakeEngine(lambda request: list(b"hi")))
    answer = chat(app, thinking_budget=5)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "thinking_budget")
    assert chat(app, reasoning_effort="low").status_code == 200


def test_an_unknown_effort_is_refused() -> None:
    app = app_of(FakeEngine(thinker), output_format=THINKS)
    assert error_of(chat(app, reasoning_effort="huge"))["param"] == "reasoning_effort"


def test_the_answer_is_begun_before_the_thought_is_given_up() -> None:
    running: list[set[str]] = []

    def script(request: GenerationRequest) -> list[int]:
        running.append(set(engine.running))
        return thinker(request)

    engine = FakeEngine(script)
    chat(app_of(engine, output_format=THINKS, template=OPENS), thinking_budget=10)
    thought, answer = engine.requests
    assert running[1] == {thought.request_id, answer.request_id}, "a drain must see no gap"
    assert engine.aborted == [thought.request_id]
