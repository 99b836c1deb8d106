"""A server without a network or a clock: its answers take exactly the seconds that a script says.

Runs in a loop whose time passes only while everybody waits, so that a benchmark of minutes takes
no time and its figures are exact.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

Result = TypeVar("Result")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Waiting moves the clock instead of lasting."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_InstantSelector(self))

    def time(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


class _InstantSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready: list[Any] = super().select(0)
        if not ready and timeout:
            self._loop.advance(timeout)
        assert ready or timeout is not None, "everybody waits for ever"
        return ready


def run_virtual(job: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(job())


@dataclass
class ScriptedServer:
    """Answers `prefill_s` seconds per prompt token later, a token every `step_s`.

    Cached: what an earlier prompt began with. `fails_after`: requests that are answered before all
    connections break; `refuses`: what makes a 400 of a request.
    """

    prefill_s: float = 0.001
    step_s: float = 0.01
    tokens_per_chunk: int = 1
    fails_after: int | None = None
    is_hexlm: bool = False
    has_usage: bool = True
    refuses: Callable[[dict[str, Any]], bool] = lambda body: False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_left: int = 0
    num_running: int = 0
    num_steps: int = 0
    drafts_per_step: int = 0

    def client(self) -> httpx.AsyncClient:
        transport = httpx.MockTransport(self.answer)
        return httpx.AsyncClient(transport=transport, base_url="http://scripted")

    async def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if self.fails_after is not None and len(self.bodies) >= self.fails_after:
            raise httpx.ConnectError("connection refused", request=request)
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "small", "max_model_len": 1024}]})
        if path == "/" and self.is_hexlm:
            return httpx.Response(200, json={"name": "hexlm"})
        if path == "/health" and self.is_hexlm:
            return httpx.Response(200, json={"models": {"small": self._health()}})
        if path == "/metrics" and self.is_hexlm:
            return httpx.Response(200, text=self._metrics())
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return httpx.Response(404, json={"error": {"message": "no such path"}})
        body = json.loads(request.content)
        if self.refuses(body):
            return httpx.Response(400, json={"error": {"message": "this is not understood"}})
        self.bodies.append(body)
        return httpx.Response(200, stream=_Stream(self, body))

    def cached_tokens(self, prompt: Any) -> int:
        """The longest beginning that an earlier prompt had, too."""
        if not isinstance(prompt, list):
            return 0
        earlier = [b["prompt"] for b in self.bodies[:-1] if isinstance(b.get("prompt"), list)]
        return max((_common(prompt, other) for other in earlier), default=0)

    def _health(self) -> dict[str, Any]:
        engine = {"device": "cpu", "kv_format": "int8", "max_model_len": 1024, "block_size": 16}
        return {"state": "ready", "engine": engine}

    def _metrics(self) -> str:
        labels = 'model_name="small"'
        return (
            f"hexlm:num_requests_running{{{labels}}} {self.num_running}\n"
            f"hexlm:num_requests_waiting{{{labels}}} 0\n"
            f"hexlm:kv_blocks_free{{{labels}}} {100 - 5 * self.num_running}\n"
            f"hexlm:engine_steps_total{{{labels}}} {self.num_steps}\n"
            f"hexlm:draft_tokens_total{{{labels}}} {self.num_steps * self.drafts_per_step}\n"
            f"hexlm:accepted_tokens_total{{{labels}}} "
            f"{self.num_steps * (self.tokens_per_chunk - 1)}\n"
            f'hexlm:step_time_seconds_sum{{{labels},phase="execute"}} {self.num_steps * 0.008}\n'
            f'hexlm:step_time_seconds_sum{{{labels},phase="sample"}} {self.num_steps * 0.001}\n'
        )


def _common(first: list[int], second: list[int]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


class _Stream(httpx.AsyncByteStream):
    def __init__(self, server: ScriptedServer, body: dict[str, Any]) -> None:
        self._server, self._body = server, body
        self._is_over = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        server, body = self._server, self._body
        server.num_running += 1
        try:
            prompt = body.get("prompt") or body["messages"][0]["content"]
            num_prompt = len(prompt) if isinstance(prompt, list) else len(prompt.split())
            cached = server.cached_tokens(prompt)
            await asyncio.sleep(server.prefill_s * (num_prompt - cached))
            total = body["max_tokens"]
            for first in range(0, total, server.tokens_per_chunk):
                if first:
                    await asyncio.sleep(server.step_s)
                server.num_steps += 1
                yield _event({"choices": [{"text": "x", "delta": {"content": "x"}}]})
            if server.has_usage:
                usage = {
                    "prompt_tokens": num_prompt,
                    "completion_tokens": total,
                    "prompt_tokens_details": {"cached_tokens": cached},
                }
                yield _event({"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
            self._is_over = True
        finally:
            server.num_running -= 1
            server.num_left += not self._is_over


def _event(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"
