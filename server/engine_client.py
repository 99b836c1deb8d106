"""The async facade of one engine process: generate, abort, stats, drain, exact resume.

A request lives here from its admission to its last output. When the engine dies, every live
request is submitted again with the tokens that were already received; sampling is a function of
(seed, position), so the clients see a pause and the very text they would have had.
Does not know text, HTTP or what runs inside the engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.messages import (
    Abort,
    GenerationRequest,
    StepOutput,
    StepResult,
    StepStats,
    TraceResult,
)
from server.engine_process import EngineLauncher
from server.engine_state import EngineState
from server.errors import QueueFull
from server.finish_rate import FinishRate
from server.live_request import LiveRequest, OutputStream
from server.supervised_engine import SupervisedEngine
from server.supervisor import EngineSupervisor, SupervisionPolicy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientPolicy:
    """`max_num_seqs` of the engine run, `max_queue` more may wait, the rest is refused."""

    max_num_seqs: int
    max_queue: int
    max_resumes_per_request: int = 3
    supervision: SupervisionPolicy = field(default_factory=SupervisionPolicy)


class EngineClient(SupervisedEngine):
    """One model's engine. Create it and use it in the event loop's thread; `start` it once."""

    def __init__(
        self,
        name: str,
        launcher: EngineLauncher,
        policy: ClientPolicy,
        on_stats: Callable[[StepStats], None] = lambda stats: None,
    ) -> None:
        super().__init__(name, EngineSupervisor(name, launcher, policy.supervision, self))
        self._policy = policy
        self._on_stats = on_stats
        self._live: dict[str, LiveRequest] = {}
        self._rate = FinishRate()

    @property
    def num_unfinished(self) -> int:
        return len(self._live)

    def generate(self, request: GenerationRequest) -> OutputStream:
        """Submit a sequence and return its outputs, the last one with a finish reason.

        One with `resumed_token_ids` goes on with an answer that was let in before: it is not
        refused for a full queue, a drain or a restart in the middle of the answer.

        Raises:
            EngineUnavailable: the engine is loading, restarting, dead or draining.
            QueueFull: `max_num_seqs + max_queue` sequences are unfinished.
        """
        if not request.resumed_token_ids or self.state is EngineState.FAILED:
            self._admit()
        assert request.request_id not in self._live, f"request id {request.request_id} is in use"
        if not self._live:
            self._rate.become_busy(time.monotonic())
            self._supervisor.note_work()
            self._idle.clear()
        live = LiveRequest(request)
        self._live[live.request_id] = live
        self._supervisor.send(request)
        return OutputStream(live, self._abandon)

    async def trace(self, num_steps: int, timeout_s: float) -> TraceResult:
        """The next `num_steps` steps, or as many as there were after `timeout_s`.

        Raises TraceBusy while another trace runs, and EngineUnavailable.
        """
        self._refuse_unless_ready()
        return await self._trace.record(num_steps, timeout_s)

    def _admit(self) -> None:
        self._refuse_unless_ready()
        limit = self._policy.max_num_seqs + self._policy.max_queue
        if (unfinished := len(self._live)) >= limit:
            retry_s = self._rate.retry_after_s(unfinished - limit + 1, time.monotonic())
            raise QueueFull(
                f"The queue of {self.name} is full: {unfinished} sequences are unfinished, "
                f"{self._policy.max_num_seqs} can run and {self._policy.max_queue} can wait. "
                f"Retry in {retry_s:.0f} s.",
                retry_s,
            )

    def _abandon(self, live: LiveRequest) -> None:
        """The consumer left. Outputs that are still on their way find no id and are dropped."""
        self._forget(live)
        self._supervisor.send(Abort(live.request_id))

    def _forget(self, live: LiveRequest) -> None:
        if self._live.pop(live.request_id, None) is not None and not self._live:
            self._rate.become_idle(time.monotonic())
            self._idle.set()

    def _deliver(self, output: StepOutput) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return
        live.push(output)
        if live.is_finished:
            self._rate.record(time.monotonic())
            self._forget(live)

    def _end(self, live: LiveRequest, error: str) -> None:
        live.fail(error)
        self._abandon(live)

    def _fail_all(self, error: str) -> None:
        for live in tuple(self._live.values()):
            self._end(live, error)

    # What the supervisor reports (`SupervisorListener`).

    def has_work(self) -> bool:
        return bool(self._live)

    def engine_ready(self) -> None:
        info = self.info
        if info is not None:
            self._stats = StepStats(num_blocks=info.num_blocks, num_free_blocks=info.num_blocks)
        if self._live:
            logger.info("%s continues %d requests", self.name, len(self._live))
        for live in self._live.values():
            self._supervisor.send(live.resumption())

    def engine_stepped(self, result: StepResult) -> None:
        self._stats = result.stats
        for output in result.outputs:
            self._deliver(output)
        self._on_stats(result.stats)

    def engine_died(self, was_ready: bool) -> None:
        """A request that saw too many deaths may be their cause: it must not end every engine."""
        self._stats = StepStats()
        self._trace.deliver(f"The engine of {self.name} ended while it was being traced.")
        if not was_ready:
            return  # nothing had been submitted to it
        for live in tuple(self._live.values()):
            live.num_deaths += 1
            if live.num_deaths > self._policy.max_resumes_per_request:
                self._end(live, f"The engine died {live.num_deaths} times under this request.")

    def engine_failed(self, reason: str) -> None:
        self._fail_all(f"The engine failed: {reason.rstrip('.')}.")

    def tick(self) -> None:
        """Deadlines, while no engine is there to keep them."""
        if self.state is EngineState.READY:
            return
        now_s = time.time()
        for live in tuple(self._live.values()):
            deadline_s = live.request.deadline_s
            if deadline_s is not None and deadline_s < now_s:
                live.expire()
                self._abandon(live)
