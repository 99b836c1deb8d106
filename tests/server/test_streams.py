"""What only a real socket shows: timing, comments, clients that leave, clients that do not read."""

import json
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from server.http_settings import HttpSettings
from tests.server.http_client import HI, app_of, listening
from tests.server.scripted_client import FakeEngine, saying

FAST_COMMENTS = HttpSettings(keep_alive_interval_s=0.05)


def until(condition: Callable[[], bool], seconds: float = 3.0) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.005)


def endless(step_s: float = 0.01) -> FakeEngine:
    engine = FakeEngine(saying("x" * 450))
    engine.step_s = step_s
    return engine


def open_socket(url: str, path: str, body: dict[str, Any]) -> socket.socket:
    host = httpx.URL(url)
    connection = socket.create_connection((host.host, host.port or 0), timeout=5)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


CHAT = ("/v1/chat/completions", {"messages": HI, "max_tokens": 450})
COMPLETION = ("/v1/completions", {"prompt": "a", "max_tokens": 450})


@pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETION])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_leaves_frees_its_sequences(
    path: str, body: dict[str, Any], stream: bool, n: int
) -> None:
    engine = endless()
    with listening(app_of(engine)) as url:
        connection = open_socket(url, path, body | {"stream": stream, "n": n})
        until(lambda: len(engine.running) == n and engine.num_steps > 3)
        connection.close()
        until(lambda: not engine.running)
        assert len(engine.aborted) == n


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_token_frees_its_sequence(stream: bool) -> None:
    engine = endless(step_s=60)
    with listening(app_of(engine)) as url:
        connection = open_socket(url, CHAT[0], CHAT[1] | {"stream": stream})
        until(lambda: len(engine.running) == 1)
        # A reset instead of an orderly end.
        linger = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()
        until(lambda: not engine.running)


def test_headers_and_comments_come_while_the_engine_is_silent() -> None:
    engine = FakeEngine(saying("ab"))
    engine.step_s = 0.3
    with (
        listening(app_of(engine, FAST_COMMENTS)) as url,
        httpx.stream("POST", url + CHAT[0], json=CHAT[1] | {"stream": True}) as response,
    ):
        assert engine.num_steps == 0
        text = "".join(response.iter_text())
    frames = text.split("\n\n")
    assert frames.pop() == ""
    assert frames[0] == ": keep-alive"
    assert frames.count(": keep-alive") >= 6
    assert all(frame == ": keep-alive" or frame.startswith("data: ") for frame in frames)
    assert frames[-1] == "data: [DONE]"
    assert "\r" not in text and ": ping" not in text


def test_the_first_token_is_sent_before_the_last_is_made() -> None:
    engine = endless(step_s=0.02)
    with listening(app_of(engine)) as url:
        body = CHAT[1] | {"stream": True}
        with httpx.stream("POST", url + CHAT[0], json=body) as response:
            lines = response.iter_lines()
            next(line for line in lines if '"content":"x"' in line)
            assert engine.num_steps < 20


def test_a_reader_that_stops_gets_all_its_text_later_and_delays_nobody() -> None:
    slow = FakeEngine(saying("é" * 200))
    with listening(app_of(slow)) as url:
        sleepers = [open_socket(url, CHAT[0], CHAT[1] | {"stream": True}) for _ in range(4)]
        until(lambda: len(slow.requests) == 4)
        start_s = time.monotonic()
        assert httpx.post(url + CHAT[0], json=CHAT[1]).status_code == 200
        assert time.monotonic() - start_s < 2
        until(lambda: not slow.running)
        for sleeper in sleepers:
            received = b""
            while b"[DONE]" not in received:
                received += sleeper.recv(65536)
            sleeper.close()
            assert received.decode().count("é") == 200


def test_a_connection_serves_several_requests_streamed_and_not() -> None:
    with listening(app_of(FakeEngine(saying("hi")))) as url, httpx.Client(base_url=url) as client:
        for stream in (False, True, False):
            assert client.post(CHAT[0], json=CHAT[1] | {"stream": stream}).status_code == 200


def sdk(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1/", api_key="none", max_retries=0)


def test_the_openai_client_gets_the_same_text_both_ways() -> None:
    engine = FakeEngine(saying("Grüße 😀"))
    with listening(app_of(engine, FAST_COMMENTS)) as url, sdk(url) as client:
        whole = client.chat.completions.create(model="fake/model", messages=HI)  # type: ignore[arg-type]
        assert whole.choices[0].message.content == "Grüße 😀"
        assert whole._request_id is not None
        engine.step_s = 0.02
        with client.chat.completions.stream(
            model="fake/model",
            messages=HI,  # type: ignore[arg-type]
            stream_options={"include_usage": True},
        ) as stream:
            kinds = [event.type for event in stream]
        final = stream.get_final_completion()
        assert final.choices[0].message.content == "Grüße 😀"
        assert final.usage == whole.usage
        assert kinds.count("content.done") == 1
        assert [model.id for model in client.models.list()] == ["fake/model"]


def test_the_openai_client_accumulates_choices_and_logprobs() -> None:
    with listening(app_of(FakeEngine(saying("ab")))) as url, sdk(url) as client:
        with client.chat.completions.stream(
            model="fake/model",
            messages=HI,  # type: ignore[arg-type]
            n=2,
            logprobs=True,
        ) as stream:
            final = stream.get_final_completion()
        assert [choice.message.content for choice in final.choices] == ["ab", "ab"]
        logprobs = final.choices[1].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert [entry.token for entry in logprobs.content] == ["a", "b"]
        text = client.completions.create(model="fake/model", prompt=["a", "b"], echo=True)
        assert [choice.text for choice in text.choices] == ["aab", "bab"]


def test_the_openai_client_raises_its_own_errors() -> None:
    engine = FakeEngine(saying("hello"))
    with listening(app_of(engine)) as url, sdk(url) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.chat.completions.create(model="no", messages=HI)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model="fake/model", messages=HI, temperature=9)  # type: ignore[arg-type]
        engine.fail_after = 2
        stream = client.chat.completions.create(model="fake/model", messages=HI, stream=True)  # type: ignore[arg-type]
        with pytest.raises(openai.APIError, match="the scripted error"):
            list(stream)
