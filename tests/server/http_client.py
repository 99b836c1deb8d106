"""Requests to an application in this process, without a socket, and to one behind a socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from server.app import create_app
from server.http_settings import HttpSettings
from tests.server.scripted_client import FakeEngine, FakeRegistry, saying, served

HI = [{"role": "user", "content": "Say hello."}]


def app_of(engine: FakeEngine, settings: HttpSettings | None = None, **model: Any) -> FastAPI:
    return create_app(FakeRegistry(served(engine, **model)), settings)


def send(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    """One request to `app`; the body of a stream is read to its end."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def post(app: FastAPI, path: str, body: Any) -> httpx.Response:
    return send(app, "POST", path, json=body)


def chat(app: FastAPI, **fields: Any) -> httpx.Response:
    return post(app, "/v1/chat/completions", {"messages": HI, **fields})


def complete(app: FastAPI, **fields: Any) -> httpx.Response:
    return post(app, "/v1/completions", {"prompt": "ab", **fields})


def chat_saying(text: str, **fields: Any) -> httpx.Response:
    return chat(app_of(FakeEngine(saying(text))), **fields)


def events(response: httpx.Response) -> list[Any]:
    """The JSON of each event; the frames are checked to the byte, `[DONE]` stays text."""
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames.pop() == "", "the stream does not end in a blank line"
    data = [frame.removeprefix("data: ") for frame in frames if not frame.startswith(":")]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


def content(chunks: list[Any], index: int = 0) -> str:
    """The concatenated deltas of one chat choice."""
    choices = [c for chunk in chunks if chunk != "[DONE]" for c in chunk["choices"]]
    return "".join(c["delta"].get("content", "") for c in choices if c["index"] == index)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, checked for OpenAI's four keys."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@contextlib.contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The base URL of `app` behind a real server on a free port of 127.0.0.1."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            threading.Event().wait(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
