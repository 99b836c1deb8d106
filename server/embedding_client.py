"""The async facade of one embedding engine: embed, drain, and again after a death of the engine.

An encoder keeps no state, so a request whose engine died is simply sent again; vectors that had
already arrived are kept, and those that come twice are the same. Does not know text or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import numpy as np

from scheduler.messages import Abort, EmbedRequest, EmbedResult, EmbedStep, StepStats
from server.engine_client import ClientPolicy
from server.engine_process import EngineLauncher
from server.errors import GenerationFailed, QueueFull
from server.finish_rate import FinishRate
from server.limits import MAX_QUEUED_EMBEDDING_TOKENS
from server.served_embedder import Float32Array
from server.supervised_engine import SupervisedEngine
from server.supervisor import EngineSupervisor

logger = logging.getLogger(__name__)


class _LiveEmbedding:
    """A request on its way: what has arrived, what is missing, and who waits for it."""

    def __init__(self, request: EmbedRequest, dimensions: int) -> None:
        self.request = request
        self.num_tokens = sum(map(len, request.inputs))
        self.num_deaths = 0
        self.answer: asyncio.Future[Float32Array] = asyncio.get_running_loop().create_future()
        self._vectors = np.empty((len(request.inputs), dimensions), np.float32)
        self._missing = set(range(len(request.inputs)))

    def take(self, result: EmbedResult) -> None:
        indexes = list(result.indexes)
        vectors = np.frombuffer(result.vectors, "<f4").reshape(len(indexes), -1)
        self._vectors[indexes] = vectors
        self._missing.difference_update(indexes)
        if not self._missing and not self.answer.done():
            self.answer.set_result(self._vectors)

    def fail(self, error: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(GenerationFailed(error, code="embedding_failed"))


class EmbeddingClient(SupervisedEngine):
    """One embedding model's engine. Implements `EmbeddingEngine`."""

    def __init__(
        self,
        name: str,
        launcher: EngineLauncher,
        policy: ClientPolicy,
        dimensions: int,
        on_stats: Callable[[StepStats], None] = lambda stats: None,
    ) -> None:
        super().__init__(name, EngineSupervisor(name, launcher, policy.supervision, self))
        self._policy = policy
        self._dimensions = dimensions
        self._on_stats = on_stats
        self._live: dict[str, _LiveEmbedding] = {}
        self._num_tokens = 0
        self._rate = FinishRate()

    @property
    def num_unfinished(self) -> int:
        return len(self._live)

    async def embed(self, request: EmbedRequest) -> Float32Array:
        """Vectors [inputs, dimensions] of length 1; cancelling it drops the request.

        Raises:
            EngineUnavailable: the engine is loading, restarting, dead or draining.
            QueueFull: too many requests, or tokens of requests, are unfinished.
            GenerationFailed: the engine could not compute it.
        """
        live = self._submit(request)
        try:
            return await live.answer
        finally:
            if not live.answer.done() or live.answer.cancelled():
                self._supervisor.send(Abort(request.request_id))
            self._forget(live)

    def _submit(self, request: EmbedRequest) -> _LiveEmbedding:
        live = _LiveEmbedding(request, self._dimensions)
        self._admit(live)
        assert request.request_id not in self._live, f"request id {request.request_id} is in use"
        if not self._live:
            self._rate.become_busy(time.monotonic())
            self._supervisor.note_work()
            self._idle.clear()
        self._live[request.request_id] = live
        self._num_tokens += live.num_tokens
        self._supervisor.send(request)
        return live

    def _admit(self, live: _LiveEmbedding) -> None:
        """A request that is alone is always taken, however large it is."""
        self._refuse_unless_ready()
        limit = self._policy.max_num_seqs + self._policy.max_queue
        has_room = self._num_tokens + live.num_tokens <= MAX_QUEUED_EMBEDDING_TOKENS
        if len(self._live) < limit and (has_room or not self._live):
            return
        retry_s = self._rate.retry_after_s(max(1, len(self._live) - limit + 1), time.monotonic())
        raise QueueFull(
            f"The queue of {self.name} is full: {len(self._live)} requests with "
            f"{self._num_tokens} tokens are unfinished; it takes {limit} requests with "
            f"{MAX_QUEUED_EMBEDDING_TOKENS} tokens. Retry in {retry_s:.0f} s.",
            retry_s,
        )

    def _forget(self, live: _LiveEmbedding) -> None:
        if self._live.pop(live.request.request_id, None) is None:
            return
        self._num_tokens -= live.num_tokens
        if not self._live:
            self._rate.become_idle(time.monotonic())
            self._idle.set()

    def _fail_all(self, error: str) -> None:
        for live in tuple(self._live.values()):
            self._end(live, error)

    def _end(self, live: _LiveEmbedding, error: str) -> None:
        live.fail(error)
        self._supervisor.send(Abort(live.request.request_id))
        self._forget(live)

    # What the supervisor reports (`SupervisorListener`).

    def has_work(self) -> bool:
        return bool(self._live)

    def engine_ready(self) -> None:
        if self._live:
            logger.info("%s computes %d requests again", self.name, len(self._live))
        for live in self._live.values():
            self._supervisor.send(live.request)

    def engine_stepped(self, step: EmbedStep, /) -> None:
        self._stats = step.stats
        for result in step.results:
            self._deliver(result)
        self._on_stats(step.stats)

    def _deliver(self, result: EmbedResult) -> None:
        live = self._live.get(result.request_id)
        if live is None:
            return
        if result.error is not None:
            self._end(live, f"The engine failed: {result.error}.")
            return
        live.take(result)
        if live.answer.done():
            self._rate.record(time.monotonic())
            self._forget(live)

    def engine_died(self, was_ready: bool) -> None:
        """A request that saw too many deaths may be their cause: it must not end every engine."""
        self._stats = StepStats()
        if not was_ready:
            return
        for live in tuple(self._live.values()):
            live.num_deaths += 1
            if live.num_deaths > self._policy.max_resumes_per_request:
                self._end(live, f"The engine died {live.num_deaths} times under this request.")

    def engine_failed(self, reason: str) -> None:
        self._fail_all(f"The engine failed: {reason.rstrip('.')}.")

    def tick(self) -> None:
        """Whoever waits for a vector keeps the request's deadline."""
