"""A thin streaming client for measurements: raw sockets, one connection a request, no parsing of
more than it needs, so that the client does not become what is measured."""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds since the request was sent: first text, last event; and tokens by the usage."""

    first_s: float
    last_s: float
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first."""
        return (self.num_tokens - 1) / (self.last_s - self.first_s)


def stream(port: int, body: dict[str, Any]) -> Timing:
    """One streamed /v1/completions. Raises RuntimeError when the server does not answer 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    payload = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}})
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {response.read()[:300]!r}")
    first_s = last_s = 0.0
    num_tokens = 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        last_s = time.perf_counter() - start
        first_s = first_s or last_s
        if b'"usage":{' in line:
            num_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    connection.close()
    return Timing(first_s, last_s, num_tokens)


def stream_all(port: int, bodies: list[dict[str, Any]]) -> tuple[float, list[Timing]]:
    """All at once, a thread each: (wall seconds until the last ended, timings)."""
    timings: list[Timing | None] = [None] * len(bodies)

    def run(index: int) -> None:
        timings[index] = stream(port, bodies[index])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(bodies))]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s = time.perf_counter() - start
    done = [timing for timing in timings if timing is not None]
    if len(done) != len(bodies):
        raise RuntimeError(f"only {len(done)} of {len(bodies)} streams ended well")
    return wall_s, done
