"""A server that is measured: asked over HTTP, its answers timed chunk by chunk.

All effects of the benchmark on a server are here. Any OpenAI-compatible server will do; of hexlm,
/metrics and /health are read, too. Knows no suites.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from server.bench.dialect import Dialect, StreamReader
from server.bench.errors import NotAvailable, RequestFailed, TargetLost
from server.bench.metrics_text import MetricsChange, MetricsSnapshot, parse_metrics
from server.bench.sse_frames import SseFrames
from server.bench.timing import Timing
from server.bench.workloads import Prompt

TIMEOUT_S = 600.0
MAX_SHOWN = 300

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What is known of a server. `facts` is what the report shows; no addresses.

    `max_model_len` None: it does not say. `cost`: what a step of this model must move and compute,
    where its bundle is here (`model_cost.py`).
    """

    model: str
    kind: str = "OpenAI-compatible"
    max_model_len: int | None = None
    block_size: int = 16
    facts: dict[str, Any] = field(default_factory=dict)
    cost: dict[str, Any] = field(default_factory=dict)

    @property
    def is_hexlm(self) -> bool:
        return self.kind == "hexlm"


@dataclass(slots=True)
class Target:
    """`http` has the server's base URL. `pid`: its process, if it is on this machine."""

    name: str
    http: httpx.AsyncClient
    info: TargetInfo
    dialect: Dialect
    pid: int | None = None
    clock: Clock = time.perf_counter

    async def ask(
        self,
        prompt: Prompt,
        num_new: int,
        *,
        leave_after: int | None = None,
        heard: Callable[[], None] = lambda: None,
        **fields: Any,
    ) -> Timing:
        """One streamed answer; left after so many chunks of text if `leave_after` is given.

        `heard` is called at each of them; `fields` go into the request.

        Raises:
            TargetLost: there is no connection.
            RequestFailed: any other answer than a whole stream.
        """
        body = self.dialect.body(self.info.model, prompt, num_new, **fields)
        reader = StreamReader()
        sent_s = self.clock()
        async with self._opened(self.dialect.path, body) as response:
            frames = SseFrames()
            async for piece in response.aiter_bytes():
                now_s = self.clock() - sent_s
                for data in frames.feed(piece):
                    if reader.take(data, now_s):
                        heard()
                if leave_after is not None and reader.num_chunks >= leave_after:
                    break
        timing = reader.timing(self.clock() - sent_s)
        if not timing.arrivals_s:
            raise RequestFailed("the answer has no tokens")
        return timing

    @contextlib.asynccontextmanager
    async def _opened(self, path: str, body: dict[str, Any]) -> AsyncIterator[httpx.Response]:
        try:
            async with self.http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    raise refused(response.status_code, await response.aread())
                yield response
        except httpx.ConnectError as error:
            raise TargetLost(f"{self.name} does not answer: {error}") from error
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise RequestFailed(f"the connection broke: {reason}") from error

    async def metrics(self) -> MetricsSnapshot:
        """Raises NotAvailable where the server is not hexlm."""
        if not self.info.is_hexlm:
            raise NotAvailable("only hexlm's /metrics has it")
        try:
            response = await self.http.get("/metrics")
        except httpx.HTTPError as error:
            raise TargetLost(f"{self.name} does not answer: {error}") from error
        return parse_metrics(response.text)

    @contextlib.asynccontextmanager
    async def observed(self) -> AsyncIterator[Observation]:
        """What /metrics counted while the block ran; empty where there is none."""
        observation = Observation()
        before = await self.metrics() if self.info.is_hexlm else None
        yield observation
        if before is not None:
            observation.change = MetricsChange(before, await self.metrics())

    def resident_bytes(self) -> int:
        """Of the process and all its children. Raises NotAvailable without a process."""
        if self.pid is None:
            raise NotAvailable("its process is not known; give it with --pid or --peer-pid")
        try:
            process = psutil.Process(self.pid)
            family = [process, *process.children(recursive=True)]
            return sum(int(each.memory_info().rss) for each in family)
        except psutil.Error as error:
            raise NotAvailable(f"its process cannot be read: {error}") from error


@dataclass(slots=True)
class Observation:
    change: MetricsChange | None = None


def refused(status: int, content: bytes) -> RequestFailed:
    text = " ".join(content.decode("utf-8", "replace").split())
    return RequestFailed(f"HTTP {status}: {text[:MAX_SHOWN]}")
