from typing import Any

import pytest

from server.errors import EngineUnavailable, QueueFull
from server.http_settings import HttpSettings
from tests.server.byte_tokenizer import IM_END, sentencepiece_tokenizer
from tests.server.http_client import (
    HI,
    app_of,
    chat,
    chat_saying,
    content,
    error_of,
    events,
)
from tests.server.scripted_client import FakeEngine, saying

TEXT = "好的 👩‍👩‍👧‍👦 naïve Ω 🇯🇵 end"


def choices(chunks: list[Any]) -> list[dict[str, Any]]:
    return [choice for chunk in chunks[:-1] for choice in chunk["choices"]]


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
def test_an_answer_is_the_same_text_streamed_and_whole(tokens_per_step: int) -> None:
    app = app_of(FakeEngine(saying(TEXT), tokens_per_step=tokens_per_step))
    whole = chat(app).json()
    assert whole["object"] == "chat.completion"
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    deltas = [c["delta"].get("content", "") for c in choices(events(chat(app, stream=True)))]
    assert "".join(deltas) == TEXT
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_stream_has_role_first_finish_last_and_one_identity() -> None:
    chunks = events(chat_saying("hello", stream=True))
    assert chunks[-1] == "[DONE]"
    assert {c["object"] for c in chunks[:-1]} == {"chat.completion.chunk"}
    assert len({(c["id"], c["created"], c["model"]) for c in chunks[:-1]}) == 1
    assert all("usage" not in c for c in chunks[:-1])
    seen = choices(chunks)
    assert seen[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert not any("role" in choice["delta"] for choice in seen[1:])
    assert (seen[-1]["delta"], seen[-1]["finish_reason"]) == ({}, "stop")
    assert not any(choice["finish_reason"] for choice in seen[:-1])


def test_usage_comes_last_alone_and_equals_the_whole_answers() -> None:
    app = app_of(FakeEngine(saying("hello"), cached_tokens=16))
    chunks = events(chat(app, stream=True, stream_options={"include_usage": True}))
    assert chunks[-2]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-2])
    usage = chunks[-2]["usage"]
    assert usage == chat(app).json()["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (6, usage["prompt_tokens"] + 6)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens_per_step", [1, 4, 50])
def test_a_stop_string_over_token_borders_ends_the_text_before_it(
    stream: bool, tokens_per_step: int
) -> None:
    engine = FakeEngine(saying("alpha beta gamma delta"), tokens_per_step=tokens_per_step)
    fields: dict[str, Any] = {"stop": ["beta gamma"], "max_tokens": 80}
    answer = chat(app_of(engine), stream=stream, **fields)
    if stream:
        text, reason = content(events(answer)), choices(events(answer))[-1]["finish_reason"]
    else:
        choice = answer.json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        assert answer.json()["usage"]["completion_tokens"] == 16
    assert (text, reason) == ("alpha ", "stop")
    assert engine.running == set()


def test_the_stop_string_can_stay() -> None:
    answer = chat_saying("one two", stop=" t", include_stop_str_in_output=True)
    assert answer.json()["choices"][0]["message"]["content"] == "one t"


@pytest.mark.parametrize("max_tokens", [3, 4, 5])
def test_a_cut_inside_a_character_ends_with_one_replacement_character(max_tokens: int) -> None:
    app = app_of(FakeEngine(saying("ab😀")))
    whole = chat(app, max_tokens=max_tokens).json()
    assert whole["choices"][0]["message"]["content"] == "ab\ufffd"
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == max_tokens
    assert content(events(chat(app, max_tokens=max_tokens, stream=True))) == "ab\ufffd"


def test_the_smaller_of_both_token_limits_wins() -> None:
    app = app_of(FakeEngine(saying("x" * 50)))
    for fields in ({"max_completion_tokens": 5}, {"max_tokens": 9, "max_completion_tokens": 5}):
        assert chat(app, **fields).json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("stream", [True, False])
def test_max_tokens_zero_is_refused_as_openai_does(stream: bool) -> None:
    engine = FakeEngine(saying("hello"))
    answer = chat(app_of(engine), max_tokens=0, stream=stream)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    assert engine.requests == []


def test_an_answer_that_fills_the_context_ends_with_length_and_done() -> None:
    app = app_of(FakeEngine(saying("x" * 600)))
    messages = [{"role": "user", "content": "x" * 430}]
    options = {"include_usage": True}
    chunks = events(chat(app, messages=messages, stream=True, stream_options=options))
    assert choices(chunks)[-1]["finish_reason"] == "length"
    assert chunks[-2]["usage"]["total_tokens"] == 512


def test_logprobs_carry_the_true_bytes_of_partial_characters() -> None:
    text = "😊é中"
    app = app_of(FakeEngine(saying(text)))
    whole = chat(app, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]
    entries = whole["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text
    assert entries[0] == {
        "token": "bytes:\\xf0",
        "logprob": -0.5,
        "bytes": [0xF0],
        "top_logprobs": [
            {"token": "bytes:\\xf0", "logprob": -0.5, "bytes": [0xF0]},
            {"token": "bytes:\\xf0", "logprob": -2.0, "bytes": [0xF0]},
        ],
    }
    streamed = choices(events(chat(app, logprobs=True, top_logprobs=2, stream=True)))
    parts = [c["logprobs"]["content"] for c in streamed if c["logprobs"]]
    assert [entry for part in parts for entry in part] == entries
    assert whole["refusal"] is None


def test_logprobs_without_rivals_have_empty_lists() -> None:
    entries = chat_saying("ab", logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in entries] == [[], []]


def test_top_logprobs_need_logprobs() -> None:
    assert error_of(chat_saying("a", top_logprobs=2))["param"] == "top_logprobs"


def test_n_choices_have_their_own_index_seed_role_and_end() -> None:
    engine = FakeEngine(lambda request: list(b"ab%d" % (request.sampling.seed % 10)))
    fields = {"n": 3, "seed": 7}
    app = app_of(engine)
    chunks = events(chat(app, stream=True, stream_options={"include_usage": True}, **fields))
    seen = choices(chunks)
    assert [c["index"] for c in seen[:3]] == [0, 1, 2]
    assert all(c["delta"].get("role") == "assistant" for c in seen[:3])
    assert sorted(c["index"] for c in seen if c["finish_reason"]) == [0, 1, 2]
    whole = chat(app, **fields).json()
    texts = [content(chunks, index) for index in range(3)]
    assert [c["message"]["content"] for c in whole["choices"]] == texts
    assert len({request.sampling.seed for request in engine.requests}) == 3
    assert engine.requests[0].sampling.seed == 7
    assert chunks[-2]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 12
    assert whole["usage"]["prompt_tokens"] == len(engine.requests[0].prompt_token_ids)


def test_ignore_eos_goes_on_and_hides_the_end_token() -> None:
    engine = FakeEngine(lambda request: [97, IM_END])
    answer = chat(app_of(engine), ignore_eos=True, max_tokens=6).json()
    assert answer["choices"][0]["message"]["content"] == "aaa"
    assert answer["choices"][0]["finish_reason"] == "length"
    shown = chat(app_of(engine), ignore_eos=True, max_tokens=2, skip_special_tokens=False).json()
    assert shown["choices"][0]["message"]["content"] == "a<|im_end|>"


def test_a_prefill_is_not_repeated_and_its_text_fires_no_stop() -> None:
    engine = FakeEngine(saying(" STOP yes"))
    messages = [*HI, {"role": "assistant", "content": "x STOP"}]
    answer = chat(app_of(engine), messages=messages, continue_final_message=True, stop="STOP y")
    assert answer.json()["choices"][0]["message"]["content"] == " "
    assert bytes(engine.requests[0].prompt_token_ids[-6:]) == b"x STOP"


def test_the_first_space_of_a_sentencepiece_answer_goes_but_not_when_continuing() -> None:
    engine = FakeEngine(lambda request: [264, 259])
    app = app_of(engine, tokenizer=sentencepiece_tokenizer(), template="{{ messages[-1].content }}")
    fields: dict[str, Any] = {"max_tokens": 2}
    assert chat(app, **fields).json()["choices"][0]["message"]["content"] == "Hello two"
    messages = [*HI, {"role": "assistant", "content": "and"}]
    answer = chat(app, messages=messages, continue_final_message=True, **fields)
    assert answer.json()["choices"][0]["message"]["content"] == " Hello two"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("refusal", "status", "retry_after"),
    [(QueueFull("full", 2.2), 429, "3"), (EngineUnavailable("loading", 0), 503, "1")],
)
def test_what_the_engine_refuses_is_an_http_error_for_streams_too(
    refusal: Any, status: int, retry_after: str, stream: bool
) -> None:
    engine = FakeEngine(saying("a"))
    engine.refusal, engine.refuses_after = refusal, 2
    response = chat(app_of(engine), n=3, stream=stream)
    assert response.status_code == status
    assert response.headers["retry-after"] == retry_after
    assert error_of(response)["message"] == refusal.message
    assert engine.running == set()
    assert len(engine.aborted) == 2


def failing(failure: Exception | None, after: int = 2) -> FakeEngine:
    engine = FakeEngine(saying("hello"))
    engine.fail_after, engine.failure = after, failure
    return engine


@pytest.mark.parametrize("failure", [None, EngineUnavailable("gone"), RuntimeError("secret")])
def test_an_error_after_the_headers_is_one_last_event(failure: Exception | None) -> None:
    chunks = events(chat(app_of(failing(failure)), stream=True))
    assert content(chunks[:-1]) == "he"
    assert chunks[-1].keys() == {"error"}
    assert chunks[-1]["error"].keys() == {"message", "type", "param", "code"}
    assert "secret" not in str(chunks[-1])


@pytest.mark.parametrize(
    ("failure", "status"), [(None, 500), (EngineUnavailable("gone"), 503), (ValueError("x"), 500)]
)
def test_an_error_in_a_whole_answer_is_an_http_error(
    failure: Exception | None, status: int
) -> None:
    response = chat(app_of(failing(failure)))
    assert response.status_code == status
    error_of(response)


def test_one_failed_choice_ends_all_of_its_request() -> None:
    engine = failing(None)
    chunks = events(chat(app_of(engine), stream=True, n=2))
    assert "error" in chunks[-1]
    assert engine.running == set()


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_is_a_504_or_an_error_event(stream: bool) -> None:
    engine = FakeEngine(saying("hello"))
    engine.step_s = 60
    app = app_of(engine, HttpSettings(default_timeout_s=0.05))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.generation._DEADLINE_GRACE_S", 0.05)
        response = chat(app, stream=stream)
    error = events(response)[-1]["error"] if stream else error_of(response)
    assert error["code"] == "deadline_exceeded"
    assert response.status_code == (200 if stream else 504)
    assert engine.running == set()


def test_the_device_is_named_in_the_response() -> None:
    assert chat_saying("a").headers["x-hexlm-device"] == "cpu"
