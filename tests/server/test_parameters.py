"""Bodies over HTTP: what is accepted, what is refused, and with which `param`."""

import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.http_settings import HttpSettings
from tests.server.http_client import HI, app_of, chat, complete, error_of, post, send
from tests.server.scripted_client import FakeEngine, saying

APP = app_of(FakeEngine(saying("hello")))
BIG = 5_000_000


def refused(response: Any, status: int = 400) -> str | None:
    assert response.status_code == status
    assert len(response.content) < 8192
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    param = error["param"]
    assert param is None or isinstance(param, str)
    return param


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-1", "1e308", "1e999", '"hot"', "true", "[1]"]
)
def test_a_temperature_that_is_no_sane_number_is_refused(value: str) -> None:
    raw = f'{{"messages":{json.dumps(HI)},"temperature":{value}}}'
    param = refused(send(APP, "POST", "/v1/chat/completions", content=raw))
    assert param == "temperature"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", -1),
        ("top_p", 1.5),
        ("min_p", 2),
        ("presence_penalty", 9),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("top_k", 0.01),
        ("top_k", -7),
        ("top_k", "5"),
        ("n", 0),
        ("n", BIG),
        ("n", True),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_completion_tokens", 1.5),
        ("stream", "maybe"),
        ("stop", 3),
        ("stop", ["a"] * 10_000),
        ("stop", [""]),
        ("stop", "x" * 5000),
        ("stop_token_ids", [99999]),
        ("seed", 2**63),
        ("seed", "a"),
        ("top_logprobs", 21),
        ("top_logprobs", 10**9),
        ("logit_bias", {"9999999": -100}),
        ("logit_bias", {str(i): 1 for i in range(2000)}),
        ("priority", "urgent"),
        ("priority", 10**6),
        ("priority", 1.5),
        ("service_tier", "gold"),
        ("metadata", "x"),
        ("messages", []),
        ("messages", "hi"),
        ("chat_template_kwargs", 3),
        ("min_tokens", -1),
        ("continue_final_message", "yes"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    param = refused(chat(APP, logprobs=True, **{name: value}))
    assert param is not None
    assert param.partition("[")[0] == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", "x"),
        ("tools", [{}] * 10_000),
        ("tool_choice", "required"),
        ("guided_whitespace_pattern", r"\s*"),
        ("functions", "x"),
        ("functions[0].name", [{"name": "a b"}]),
        ("function_call", {"name": "f"}),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("prediction.type", {"type": "audio", "content": "x"}),
        ("prediction.content", {"type": "content"}),
        ("moderation", {"model": "omni-moderation-latest"}),
        ("verbosity", "low"),
        ("web_search_options", {"search_context_size": "low"}),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_a_known_field_that_asks_for_what_is_not_done_is_refused_by_name(
    name: str, value: Any
) -> None:
    assert refused(chat(APP, **{re.split(r"[.[]", name)[0]: value})) == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "x"),
        ("best_of", 3),
        ("logprobs", 6),
        ("logprobs", True),
        ("prompt", []),
        ("prompt", ["x"] * 10**6),
        ("prompt", [[1, 99999]]),
        ("prompt", [1, -1]),
        ("prompt", [1, "a"]),
        ("prompt", {"a": 1}),
        ("prompt", ""),
        ("echo", 1),
    ],
)
def test_a_bad_completions_field_is_refused_by_name(name: str, value: Any) -> None:
    assert refused(complete(APP, **{name: value})) == name


NULLABLE = (
    "model n stop top_p seed tools tool_choice response_format logit_bias logprobs top_logprobs "
    "user stream stream_options presence_penalty frequency_penalty max_completion_tokens "
    "max_tokens audio modalities prediction functions suffix best_of echo metadata store "
    "service_tier priority cache_salt top_k min_p ignore_eos stop_token_ids temperature "
    "chat_template_kwargs"
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_null_is_the_same_as_leaving_a_field_out(path: str) -> None:
    base = {"messages": HI, "prompt": "ab"}
    answer = post(APP, path, base | dict.fromkeys(NULLABLE.split()))
    assert answer.status_code == 200
    assert answer.json()["choices"] == post(APP, path, base).json()["choices"]


@pytest.mark.parametrize(
    "content", ["hello", [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]]
)
def test_a_prediction_goes_to_the_engine_and_changes_nothing_else(content: Any) -> None:
    engine = FakeEngine(saying("hi there"))
    predicted = chat(app_of(engine), prediction={"type": "content", "content": content}).json()
    plain = chat(app_of(engine)).json()
    assert predicted["choices"] == plain["choices"]
    assert [bytes(request.predicted_token_ids) for request in engine.requests] == [b"hello", b""]


def test_unknown_and_harmless_fields_are_ignored_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fields = {
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "reasoning_effort": "low",
        "parallel_tool_calls": True,
        "user": "u1",
        "some_future_field": {"x": ["secret"]},
        "tool_choice": "none",
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "verbosity": "medium",
        "prompt_cache_key": "k",
    }
    app = app_of(FakeEngine(saying("hello")))
    with caplog.at_level("INFO", "server.validation"):
        answers = [chat(app, **fields) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["service_tier"] == "default"
    assert len(caplog.records) == 1
    assert "some_future_field" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_any_content_type_is_read_as_json(content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    body = json.dumps({"messages": HI})
    response = send(APP, "POST", "/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("where", ["model", "stop", "user", "x"])
def test_a_lone_surrogate_anywhere_is_a_json_400(where: str, stream: str) -> None:
    raw = f'{{"messages":{json.dumps(HI)},"stream":{stream},"{where}":"a\\ud83d"}}'
    assert refused(send(APP, "POST", "/v1/chat/completions", content=raw)) is None


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"{}", b'{"messages":"\xff"}'])
def test_a_body_that_is_no_request_is_a_400(raw: bytes) -> None:
    refused(send(APP, "POST", "/v1/chat/completions", content=raw))


def test_thousands_of_wrong_messages_cost_one_short_error() -> None:
    start_s = time.perf_counter()
    wrong = [{"role": "user", "content": [{"type": 5}]}] * 3000
    assert refused(chat(APP, messages=wrong)) == "messages[0].content[0]"
    assert refused(post(APP, "/detokenize", {"tokens": ["x"] * 100_000})) == "tokens[0]"
    assert time.perf_counter() - start_s < 1


def test_a_body_over_the_limit_is_a_413() -> None:
    app = app_of(FakeEngine(saying("")), HttpSettings(max_body_bytes=1000))
    assert refused(chat(app, user="x" * 2000), 413) is None

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    response = send(app, "POST", "/v1/chat/completions", content=chunks())
    assert error_of(response)["code"] == "request_too_large"


@pytest.mark.parametrize("stream", [True, False])
def test_an_over_long_prompt_is_a_json_400_with_the_counts(stream: bool) -> None:
    long = [{"role": "user", "content": "x" * 600}]
    response = chat(APP, messages=long, stream=stream)
    assert refused(response) == "messages"
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(
        "This model's maximum context length is 512 tokens. However,"
    )
    assert " 619 tokens" in error["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_an_unknown_model_is_a_404_that_lists_what_is_served(stream: bool) -> None:
    response = chat(APP, model="no-such", stream=stream)
    assert response.status_code == 404
    error = error_of(response)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "no-such" in error["message"]
    assert "fake/model" in error["message"]


def test_an_alias_is_answered_under_the_real_name() -> None:
    assert chat(APP, model="gpt-4o").json()["model"] == "fake/model"
