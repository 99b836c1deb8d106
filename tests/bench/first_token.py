"""From the start of a server's process to the first token of an answer."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

from server.bench.errors import BenchError
from server.bench.server_process import RunningServer

TIMEOUT_S = 300.0
PROMPT = list(range(1_000, 1_016))


def seconds_to_first_token(start: Callable[[], RunningServer]) -> float:
    """The server is ended afterwards. Raises BenchError."""
    began_s = time.perf_counter()
    server = start()
    try:
        _read_a_token(server)
        return time.perf_counter() - began_s
    finally:
        server.stop()


def _read_a_token(server: RunningServer) -> None:
    url = f"http://127.0.0.1:{server.port}"
    try:
        with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            asked = {"model": model, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
            body = asked | {"stream": True}
            with client.stream("POST", "/v1/completions", json=body) as response:
                if not any(line.startswith("data: {") for line in response.iter_lines()):
                    raise BenchError(f"{server.name}: HTTP {response.status_code} and no token")
    except httpx.HTTPError as error:
        raise BenchError(f"{server.name} does not answer: {error}") from error
