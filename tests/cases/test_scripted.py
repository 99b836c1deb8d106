"""Cases over HTTP on a scripted engine that need more than a status."""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest

from tests.cases.catalogue import Names, body_of, catalogue, forced_text
from tests.server.byte_tokenizer import byte_tokenizer
from tests.server.http_client import app_of, content, error_of, events, post, send
from tests.server.scripted_client import FakeEngine, saying

NAMES = Names("fake/model")
CHAT = "/v1/chat/completions"


def forced(case_id: str, **changes: Any) -> tuple[FakeEngine, dict[str, Any], str]:
    """An engine that says what the case forces, the body without the force, and that text."""
    body = body_of(case_id, NAMES, **changes)
    text = forced_text(body)
    assert text is not None
    return FakeEngine(saying(text)), body, text


def whole_text(app: Any, body: dict[str, Any]) -> tuple[str, str]:
    """Content and finish reason of the answer in one body."""
    choice = post(app, CHAT, body | {"stream": False}).json()["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


@pytest.mark.case("ST-01")
@pytest.mark.case("TK-05")
@pytest.mark.case("PA-13")
@pytest.mark.parametrize("case_id", ["ST-01", "TK-05", "PA-13"])
def test_a_forced_text_is_the_same_streamed_and_whole(case_id: str) -> None:
    engine, body, text = forced(case_id)
    app = app_of(engine)
    streamed = content(events(post(app, CHAT, body | {"stream": True, "max_tokens": 400})))
    assert streamed == text
    assert whole_text(app, body | {"max_tokens": 400}) == (text, "stop")


@pytest.mark.case("ST-02")
@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_a_cut_at_any_byte_is_the_same_both_ways(max_tokens: int) -> None:
    engine, body, text = forced("ST-02", max_tokens=max_tokens)
    app = app_of(engine)
    kept = text.encode()[:max_tokens].decode(errors="replace")
    assert whole_text(app, body) == (kept, "length")
    assert content(events(post(app, CHAT, body))) == kept


@pytest.mark.case("ST-04")
@pytest.mark.parametrize("tokens_per_step", [1, 2, 5, 64])
def test_a_stop_string_leaks_nothing_in_any_rhythm(tokens_per_step: int) -> None:
    engine, body, text = forced("ST-04")
    engine.tokens_per_step = tokens_per_step
    app = app_of(engine)
    before = text[: text.index("beta gamma")]
    assert whole_text(app, body) == (before, "stop")
    assert content(events(post(app, CHAT, body))) == before


@pytest.mark.case("ST-06")
def test_completions_stop_as_chat_does() -> None:
    body = body_of("ST-06", NAMES)
    app = app_of(FakeEngine(saying(" four five six seven")))
    for stop in ("five s", ["five s"]):
        whole = post(app, "/v1/completions", body | {"stream": False, "stop": stop}).json()
        chunks = events(post(app, "/v1/completions", body | {"stop": stop}))
        streamed = "".join(c["choices"][0]["text"] for c in chunks[:-1])
        assert whole["choices"][0]["text"] == streamed == " four "
        assert whole["choices"][0]["finish_reason"] == "stop"


@pytest.mark.case("ST-07")
def test_usage_is_sent_when_it_is_asked_for_and_only_then() -> None:
    body = body_of("ST-07", NAMES)
    app = app_of(FakeEngine(saying("hello")))
    plain = events(post(app, CHAT, body))[:-1]
    assert all(chunk["choices"] and "usage" not in chunk for chunk in plain)
    asked = events(post(app, CHAT, body | {"stream_options": {"include_usage": True}}))[:-1]
    assert [chunk["choices"] == [] for chunk in asked] == [False] * (len(asked) - 1) + [True]
    whole = post(app, CHAT, body | {"stream": False}).json()["usage"]
    assert asked[-1]["usage"] == whole
    assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]


@pytest.mark.case("TP-04")
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_parts_of_one_text_are_that_text(role: str) -> None:
    engine = FakeEngine(saying("x"))
    app = app_of(engine)
    for text in ("who is the mouse?", [{"type": "text", "text": "who is the mouse?"}]):
        message = {"role": role, "content": text, "tool_call_id": "a"}
        messages = [{"role": "user", "content": "a"}, message]
        assert post(app, CHAT, body_of("TP-04", NAMES, messages=messages)).status_code == 200
    assert engine.requests[0].prompt_token_ids == engine.requests[1].prompt_token_ids


@pytest.mark.case("TP-06")
def test_content_that_is_null_empty_or_absent_gives_one_prompt() -> None:
    engine = FakeEngine(saying("x"))
    template = (
        "{{ '' if tools else '' }}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.x }}"
        "{% endfor %};{% endfor %}"
    )
    app = app_of(engine, template=template)
    for variant in catalogue()["TP-06"].variants:
        body = body_of("TP-06", NAMES, tool_choice="none", **variant["set"])
        assert post(app, CHAT, body).status_code == 200
    prompts = {bytes(request.prompt_token_ids).decode() for request in engine.requests}
    assert prompts == {"user:sqrt of 9?;assistant:sqrt9;tool:3;"}


@pytest.mark.case("TP-09")
def test_control_tokens_that_a_user_typed_are_text() -> None:
    tokenizer = byte_tokenizer()
    body = body_of("TP-09", NAMES)
    engine = FakeEngine(saying("x"))
    assert post(app_of(engine, tokenizer=tokenizer), CHAT, body).status_code == 200
    sent = engine.requests[0].prompt_token_ids
    starts = tokenizer.encode_parsed("<|im_start|>", add_bos=False)
    assert sent.count(starts[0]) == len(body["messages"]) + 1


@pytest.mark.case("TP-11")
@pytest.mark.case("TP-12")
def test_a_prefill_ends_the_prompt_to_the_byte() -> None:
    engine = FakeEngine(saying(" four"))
    app = app_of(engine)
    for variant in catalogue()["TP-12"].variants:
        body = body_of("TP-12", NAMES, stop="```json", max_tokens=9, **variant["set"])
        answer = post(app, CHAT, body).json()
        assert answer["choices"][0]["message"]["content"] == " four"
        prefill = variant["set"]["messages"][-1]["content"].encode()
        sent = [token for token in engine.requests[-1].prompt_token_ids if token < 256]
        assert bytes(sent).endswith(b"assistant\n" + prefill)


@pytest.mark.case("PA-10")
def test_choices_of_a_stream_keep_their_index_to_the_end() -> None:
    engine = FakeEngine(lambda request: list(b"%d" % request.sampling.seed))
    app = app_of(engine)
    body = body_of("PA-10", NAMES)
    chunks = events(post(app, CHAT, body))
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    for key in ("role", "finish_reason"):
        found = [c["index"] for c in choices if c["delta"].get(key) or c.get(key)]
        assert sorted(found) == [0, 1, 2]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks[:-1]}) == 1
    whole = post(app, CHAT, body | {"stream": False, "stream_options": None}).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert texts == [content(chunks, index) for index in range(3)]
    assert len(set(texts)) == 3
    assert whole["usage"] == chunks[-2]["usage"]


@pytest.mark.case("PA-13")
def test_the_bytes_of_all_entries_are_those_of_the_text() -> None:
    engine, body, text = forced("PA-13", max_tokens=100)
    entries = post(app_of(engine), CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text
    assert not any(entry["bytes"] == [239, 191, 189] for entry in entries)
    assert all(len(entry["top_logprobs"]) <= 2 for entry in entries)


@pytest.mark.case("PA-21")
def test_prompts_and_choices_are_numbered_prompt_by_prompt() -> None:
    engine = FakeEngine(lambda request: list(request.prompt_token_ids))
    body = body_of("PA-21", NAMES)
    answer = post(app_of(engine), "/v1/completions", body).json()
    prompts = body["prompt"]
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (2 * i + j, prompt[:4]) for i, prompt in enumerate(prompts) for j in range(2)
    ]
    assert answer["usage"]["prompt_tokens"] == sum(len(prompt) for prompt in prompts)


@pytest.mark.case("HT-01")
def test_an_unknown_model_is_a_404_that_lists_what_is_served() -> None:
    error = error_of(post(app_of(FakeEngine(saying("a"))), CHAT, body_of("HT-01", NAMES)))
    assert error["code"] == "model_not_found"
    assert "no-such-model-xyz" in error["message"] and "fake/model" in error["message"]


@pytest.mark.case("CX-01")
@pytest.mark.parametrize("stream", [True, False])
def test_an_over_long_prompt_is_refused_with_both_counts(stream: bool) -> None:
    body = body_of("CX-01", NAMES, stream=stream)
    error = error_of(post(app_of(FakeEngine(saying("a"))), CHAT, body))
    assert error["code"] == "context_length_exceeded"
    limit, given = (int(number) for number in re.findall(r"(\d+) tokens", error["message"]))
    assert limit == 512
    assert given > sum(len(message["content"]) for message in body["messages"])


@pytest.mark.case("HT-16")
def test_bytes_that_are_no_utf_8_are_named() -> None:
    raw = base64.b64decode(catalogue()["HT-16"].request["raw_body_b64"])
    response = send(app_of(FakeEngine(saying("a"))), "POST", CHAT, content=raw)
    assert "UTF-8" in error_of(response)["message"]


@pytest.mark.case("HT-01")
def test_the_list_of_models_may_end_in_a_slash() -> None:
    app = app_of(FakeEngine(saying("a")))
    assert send(app, "GET", "/v1/models/").json() == send(app, "GET", "/v1/models").json()
