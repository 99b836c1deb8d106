from typing import Any

import pytest

from tests.server.byte_tokenizer import BOS, byte_tokenizer
from tests.server.http_client import app_of, complete, error_of, events
from tests.server.scripted_client import FakeEngine, saying


def texts(response: Any) -> list[str]:
    return [choice["text"] for choice in response.json()["choices"]]


def test_a_completion_has_the_legacy_shape() -> None:
    body = complete(app_of(FakeEngine(saying("xyz")))).json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "xyz", "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"]["prompt_tokens"] == 2


def test_max_tokens_is_16_when_it_is_left_out() -> None:
    assert texts(complete(app_of(FakeEngine(saying("x" * 40))))) == ["x" * 16]


def test_prompts_give_choices_in_order() -> None:
    engine = FakeEngine(lambda request: list(request.prompt_token_ids))
    body = complete(app_of(engine), prompt=["A", "BB", "C"], n=2, max_tokens=4).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "A"), (1, "A"), (2, "BB"), (3, "BB"), (4, "C"), (5, "C")
    ]  # fmt: skip
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (4, 14)


@pytest.mark.parametrize(
    ("prompt", "sent"), [([97, 98], [(97, 98)]), ([[97], [98, 99]], [(97,), (98, 99)])]
)
def test_token_ids_are_taken_as_they_are(prompt: Any, sent: Any) -> None:
    engine = FakeEngine(saying("x"))
    app = app_of(engine, tokenizer=byte_tokenizer(add_bos=True))
    assert complete(app, prompt=prompt).status_code == 200
    assert [request.prompt_token_ids for request in engine.requests] == sent


def test_text_gets_one_bos_and_the_empty_text_needs_one() -> None:
    engine = FakeEngine(saying("x"))
    app = app_of(engine, tokenizer=byte_tokenizer(add_bos=True))
    for prompt in ("a", "<s>a", ""):
        assert complete(app, prompt=prompt).status_code == 200
    sent = [request.prompt_token_ids for request in engine.requests]
    assert sent == [(BOS, 97), (BOS, 97), (BOS,)]
    assert error_of(complete(app_of(engine), prompt=""))["param"] == "prompt"


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_puts_the_prompt_before_the_answer(prompt: Any, max_tokens: int) -> None:
    engine = FakeEngine(saying("xyz"))
    response = complete(app_of(engine), prompt=prompt, echo=True, max_tokens=max_tokens)
    assert texts(response) == ["ab" + "xyz"[:max_tokens]]
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == max_tokens
    chunks = events(complete(app_of(engine), prompt=prompt, echo=True, max_tokens=0, stream=True))
    assert chunks[0]["choices"][0]["text"] == "ab"


@pytest.mark.parametrize("stream", [True, False])
def test_echoed_logprobs_score_the_prompt_as_loglikelihood_needs_it(stream: bool) -> None:
    app = app_of(FakeEngine(saying("x")))
    fields: dict[str, Any] = {"prompt": [[97, 98, 99]], "echo": True, "logprobs": 1}
    response = complete(app, max_tokens=1, stream=stream, **fields)
    if stream:
        parts = [c["choices"][0]["logprobs"] for c in events(response)[:-1]]
        lists = {k: [x for part in parts if part for x in part[k]] for k in parts[0]}
    else:
        lists = response.json()["choices"][0]["logprobs"]
    assert lists == {
        "tokens": ["a", "b", "c", "x"],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {"b": -0.5}, {"c": -0.5}, {"x": -0.5}],
        "text_offset": [0, 1, 2, 3],
    }


def test_scoring_a_prompt_without_an_answer_asks_for_one_token_and_drops_it() -> None:
    engine = FakeEngine(saying("x"))
    body = complete(app_of(engine), echo=True, logprobs=0, max_tokens=0).json()
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]
    assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == ("ab", 0)
    assert engine.requests[0].sampling.max_tokens == 1


def test_the_end_token_is_the_last_entry_of_legacy_logprobs() -> None:
    body = complete(app_of(FakeEngine(saying("é"))), logprobs=1, max_tokens=9).json()
    lists = body["choices"][0]["logprobs"]
    assert lists["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert lists["text_offset"] == [0, 0, 1]
    assert body["choices"][0]["text"] == "é"


@pytest.mark.parametrize("stop", ["five s", ["five s"]])
def test_stop_strings_work_as_in_chat(stop: Any) -> None:
    app = app_of(FakeEngine(saying("four five six")))
    fields: dict[str, Any] = {"stop": stop, "max_tokens": 40}
    assert texts(complete(app, **fields)) == ["four "]
    chunks = events(complete(app, stream=True, **fields))
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "four "


def test_streamed_prompts_interleave_under_their_own_index() -> None:
    engine = FakeEngine(lambda request: list(request.prompt_token_ids))
    options = {"include_usage": True}
    fields: dict[str, Any] = {"prompt": ["AB", "CD"], "stream": True, "stream_options": options}
    chunks = events(complete(app_of(engine), **fields))
    found = {0: "", 1: ""}
    for chunk in chunks[:-2]:
        assert chunk["usage"] is None
        found[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert found == {0: "AB", 1: "CD"}
    assert (chunks[-2]["choices"], chunks[-2]["usage"]["total_tokens"]) == ([], 10)
    assert len({chunk["id"] for chunk in chunks[:-1]}) == 1
