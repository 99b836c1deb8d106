"""A running hexlm with the small real model, and what tests ask of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from server.bench.server_process import RunningServer, free_port
from tests.cases.catalogue import Names

MODEL = "smollm2-135m-instruct"
CONTEXT_LENGTH = 512
NAMES = Names(MODEL, context_length=CONTEXT_LENGTH)
CHAT = "/v1/chat/completions"


class RealServer:
    """Requests to the server, and its own count of what runs and what is free."""

    def __init__(self, server: RunningServer) -> None:
        self.port = server.port
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{server.port}", timeout=60, trust_env=False
        )

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """The first choice of an answer in one body."""
        choice: dict[str, Any] = self.post(CHAT, body | {"stream": False})["choices"][0]
        return choice

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def chunks(self, body: dict[str, Any], path: str = CHAT) -> list[dict[str, Any]]:
        """The events of a stream, without the `[DONE]` that it must end in."""
        response = self.http.post(path, json=body | {"stream": True})
        assert response.status_code == 200, response.text
        frames = response.content.decode("utf-8").split("\n\n")
        data = [frame.removeprefix("data: ") for frame in frames if frame.startswith("data: ")]
        assert data.pop() == "[DONE]"
        return [json.loads(text) for text in data]

    def health(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get("/health").json()["models"][MODEL]
        return answer

    def wait_until_idle(self, within_s: float = 5.0) -> None:
        end_s = time.monotonic() + within_s
        while True:
            health = self.health()
            is_free = health["num_free_blocks"] == health["num_blocks"]
            if is_free and health["num_running"] == health["num_waiting"] == 0:
                return
            assert time.monotonic() < end_s, f"still busy: {health}"
            time.sleep(0.02)


@contextmanager
def real_server(folder: Path, *options: str) -> Iterator[RealServer]:
    port = free_port()
    command = [sys.executable, "-m", "server.cli.main", "serve", "--model", MODEL]
    command += ["--port", str(port), "--max-model-len", str(CONTEXT_LENGTH)]
    command += ["--kv-memory", "64MiB", *options]
    server = RunningServer("hexlm", command, port, folder / "hexlm.log")
    real = RealServer(server)
    try:
        yield real
    finally:
        real.http.close()
        server.stop()


def text_of(chunks: list[dict[str, Any]]) -> str:
    """The concatenated deltas of choice 0."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(c["delta"].get("content") or "" for c in choices if c["index"] == 0)
