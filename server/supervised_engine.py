"""What every client of an engine process has: the process, its state, and its orderly end.

Knows no requests: what is unfinished, and how it fails, is the subclass's business.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod

from engine.device_board import DeviceReport
from scheduler.messages import EngineInfo, StepStats, TraceResult
from server.engine_state import EngineState
from server.engine_trace import EngineTrace
from server.errors import EngineUnavailable
from server.supervisor import EngineSupervisor

logger = logging.getLogger(__name__)

_LOADING_RETRY_S = 5.0
_FAILED_RETRY_S = 60.0
_STOP_GRACE_S = 0.7
"""Twice this (asked, then killed) has to fit into the two seconds that follow a drain."""


class SupervisedEngine(ABC):
    """Create it and use it in the event loop's thread; `start` it once.

    A subclass keeps `_stats` up to date and `_idle` set exactly while nothing is unfinished.
    """

    def __init__(self, name: str, supervisor: EngineSupervisor) -> None:
        self.name = name
        self._supervisor = supervisor
        self._stats = StepStats()
        self._trace = EngineTrace(name, supervisor.send)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def info(self) -> EngineInfo | None:
        """None until the engine was ready for the first time."""
        return self._supervisor.info

    @property
    def devices(self) -> DeviceReport | None:
        """How its devices are now; None of an engine that has the CPU only, or is not ready."""
        return self._supervisor.devices

    @property
    def state(self) -> EngineState:
        return self._supervisor.state

    @property
    def state_detail(self) -> str:
        return self._supervisor.detail

    @property
    def stats(self) -> StepStats:
        return self._stats

    @property
    def pid(self) -> int | None:
        """Of the engine process; None while there is none."""
        return self._supervisor.pid

    @property
    @abstractmethod
    def num_unfinished(self) -> int: ...

    @abstractmethod
    def _fail_all(self, error: str) -> None:
        """End everything that is unfinished with this sentence."""

    def start(self) -> None:
        self._supervisor.start()

    async def wait_settled(self) -> None:
        """Wait until the first load has ended, well or badly; then look at `state`."""
        await self._supervisor.wait_settled()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and give the live ones `timeout_s`; then end them with an error."""
        self._supervisor.begin_drain()
        self._trace.end()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            logger.warning(
                "%d requests of %s did not finish in time", self.num_unfinished, self.name
            )
            self._fail_all("The server is shutting down; the answer is incomplete.")

    async def stop(self) -> None:
        """End the engine process; all of its memory goes back. Idempotent, bounded in time."""
        self._fail_all("The model was unloaded; the answer is incomplete.")
        await self._supervisor.stop(_STOP_GRACE_S)

    def engine_traced(self, result: TraceResult) -> None:
        self._trace.deliver(result)

    def kill(self) -> None:
        """For a second signal: end the engine process at once."""
        self._supervisor.kill()

    def _refuse_unless_ready(self) -> None:
        """Raises EngineUnavailable while the engine is loading, restarting, dead or draining."""
        if self.state is not EngineState.READY:
            detail = f": {self.state_detail}" if self.state_detail else ""
            raise EngineUnavailable(
                f"The model {self.name} is {self.state}{detail}.", self._unavailable_retry_s()
            )

    def _unavailable_retry_s(self) -> float:
        if self.state is EngineState.FAILED:
            return _FAILED_RETRY_S
        return self._supervisor.load_s or _LOADING_RETRY_S
