"""The time limit of a request: where it comes from, from when it counts, and how it is told."""

import time
from typing import Any

import httpx
import openai
import pytest

from scheduler.messages import FinishReason
from server.http_settings import HttpSettings
from tests.server.http_client import HI, app_of, chat, error_of, events, listening, send
from tests.server.response_client import respond, response_events
from tests.server.scripted_client import FakeEngine, saying

HEADER = "x-request-timeout"


def deadline_in_s(
    body: dict[str, Any], headers: dict[str, str], default_s: float | None = None
) -> float | None:
    """How far in the future the engine is told to end a request."""
    engine = FakeEngine(saying("a"))
    app = app_of(engine, HttpSettings(default_timeout_s=default_s))
    body = {"messages": HI, **body}
    answer = send(app, "POST", "/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    deadline_s = engine.requests[0].deadline_s
    return None if deadline_s is None else deadline_s - time.time()


def late() -> FakeEngine:
    """Its scheduler finds the deadline passed after two tokens."""
    engine = FakeEngine(saying("hello"))
    engine.fail_after, engine.ends_early = 2, FinishReason.DEADLINE
    return engine


def silent() -> FakeEngine:
    """Says nothing for a minute: as one that is in a queue, or in a step that hangs."""
    engine = FakeEngine(saying("hello"))
    engine.step_s = 60
    return engine


@pytest.mark.parametrize(
    ("body", "headers", "default_s", "expected_s"),
    [
        ({}, {}, None, None),
        ({}, {}, 30.0, 30),
        ({"timeout": 9.5}, {}, None, 9.5),
        ({"timeout": 90}, {}, 30.0, 90),
        ({}, {HEADER: "12"}, 30.0, 12),
        ({"timeout": 5}, {HEADER: "12"}, 30.0, 5),
    ],
)
def test_the_body_wins_over_the_header_and_that_over_the_default(
    body: dict[str, Any], headers: dict[str, str], default_s: float | None, expected_s: float | None
) -> None:
    found_s = deadline_in_s(body, headers, default_s)
    if expected_s is None:
        assert found_s is None
    else:
        assert found_s is not None
        assert expected_s - 2 < found_s <= expected_s


@pytest.mark.parametrize("value", [0, -1, "5", True, 86_401])
def test_a_wrong_limit_in_the_body_is_named(value: Any) -> None:
    answer = chat(app_of(late()), timeout=value)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "timeout")


@pytest.mark.parametrize("value", ["", "soon", "0", "-3", "nan", "inf", "1e9"])
def test_a_wrong_limit_in_the_header_is_named(value: str) -> None:
    app = app_of(late())
    answer = send(
        app, "POST", "/v1/chat/completions", json={"messages": HI}, headers={HEADER: value}
    )
    assert (answer.status_code, error_of(answer)["param"]) == (400, HEADER)


def test_the_time_before_the_engine_is_reached_counts() -> None:
    engine = FakeEngine(saying("a"))
    body = b'{"messages": [{"role": "user", "content": "a"}], "timeout": 60}'

    def slowly() -> Any:
        yield body[:10]
        time.sleep(0.3)
        yield body[10:]

    with listening(app_of(engine)) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", content=slowly())
    assert answer.status_code == 200
    assert engine.requests[0].deadline_s is not None
    assert engine.requests[0].deadline_s - time.time() < 59.75


@pytest.mark.parametrize("engine", [late(), silent()], ids=["during decode", "before a token"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_passed_deadline_is_a_typed_error_in_every_phase(
    engine: FakeEngine, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.generation._DEADLINE_GRACE_S", 0.05)
    answer = chat(app_of(engine), stream=stream, timeout=0.05)
    if stream:
        assert answer.status_code == 200
        error = events(answer)[-1]["error"]
    else:
        assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
        error = error_of(answer)
    assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
    assert engine.running == set()


def test_a_response_that_is_late_has_failed() -> None:
    assert respond(app_of(late())).status_code == 504
    last = response_events(respond(app_of(late()), stream=True))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["type"] == "timeout_error"


def test_the_openai_client_does_not_repeat_a_request_that_was_late() -> None:
    engine = late()
    with (
        listening(app_of(engine)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client,
        pytest.raises(openai.InternalServerError, match="time limit"),
    ):
        client.chat.completions.create(
            model="fake/model", messages=[{"role": "user", "content": "a"}]
        )
    assert len(engine.requests) == 1
