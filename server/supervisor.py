"""Keeps one engine process alive: launch, back-off after death, stall detection, the end.

Owns the process and the `EngineState`; tells a listener what happened. Does not know requests:
whether there is work, and what to resubmit after a restart, is the listener's business.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from engine.device_board import DeviceReport
from scheduler.messages import (
    EmbedStep,
    EngineFailed,
    EngineInfo,
    EngineLoading,
    EngineReady,
    FromEngine,
    Shutdown,
    StepResult,
    ToEngine,
    TraceResult,
)
from server.engine_link import EngineLink
from server.engine_process import EngineLauncher, describe_exit
from server.engine_state import EngineState
from server.restart_budget import RestartBudget

logger = logging.getLogger(__name__)

_MAX_TICK_S = 1.0
_SLEPT_S = 5.0
"""A tick that comes this late means that the machine slept or the loop hung, not the engine."""


@dataclass(frozen=True, slots=True)
class SupervisionPolicy:
    """A stall is `stall_timeout_s` without a step while work is waiting."""

    stall_timeout_s: float = 60.0
    max_restarts: int = 5
    restart_window_s: float = 600.0


Step_contra = TypeVar("Step_contra", StepResult, EmbedStep, contravariant=True)


class SupervisorListener(Protocol[Step_contra]):
    """Called on the event loop's thread; must not raise. Its kind of step is its engine's."""

    def has_work(self) -> bool: ...

    def engine_ready(self) -> None: ...

    def engine_stepped(self, result: Step_contra, /) -> None: ...

    def engine_traced(self, result: TraceResult) -> None: ...

    def engine_died(self, was_ready: bool) -> None:
        """It will be restarted, unless `engine_failed` follows at once."""
        ...

    def engine_failed(self, reason: str) -> None:
        """There will be no engine any more."""
        ...

    def tick(self) -> None:
        """Now and then, in every state."""
        ...


class EngineSupervisor:
    """All members belong to the event loop's thread."""

    def __init__(
        self,
        name: str,
        launcher: EngineLauncher,
        policy: SupervisionPolicy,
        listener: SupervisorListener[Any],
    ) -> None:
        self.state = EngineState.LOADING
        self.detail = "starting the engine process"
        self.info: EngineInfo | None = None
        self.devices: DeviceReport | None = None
        self.load_s: float | None = None  # how long the last load took
        self._name = name
        self._launcher = launcher
        self._policy = policy
        self._listener = listener
        self._budget = RestartBudget(policy.max_restarts, policy.restart_window_s)
        self._link: EngineLink | None = None
        self._link_is_ready = False
        self._cause = ""  # of the restart that is under way
        self._launched_s = 0.0
        self._progress_s = 0.0
        self._settled = asyncio.Event()
        self._watch_task: asyncio.Task[None] | None = None
        self._restart: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """Of the running process; None between two of them."""
        return self._link.handle.pid if self._link is not None else None

    def start(self) -> None:
        """Launch and return; `wait_settled` tells when it is ready or has failed."""
        self._watch_task = asyncio.create_task(self._watch())
        self._launch()

    async def wait_settled(self) -> None:
        """Wait for the first of READY, FAILED and DRAINING."""
        await self._settled.wait()

    def send(self, message: ToEngine) -> None:
        """Dropped while there is no engine; the listener resubmits when one is ready."""
        if self._link is not None and self._link_is_ready:
            self._link.send(message)

    def note_work(self) -> None:
        """The first work after idleness arrived: the stall clock starts here."""
        self._progress_s = time.monotonic()

    def begin_drain(self) -> None:
        """From now on a death is not followed by a restart."""
        if self.state is not EngineState.FAILED:
            self._enter(EngineState.DRAINING, "the server is shutting down")

    async def stop(self, grace_s: float) -> None:
        """End the process: asked first if it can listen, killed after `grace_s`. Idempotent."""
        self.begin_drain()
        if self._watch_task is not None:
            self._watch_task.cancel()
        if self._restart is not None:
            self._restart.cancel()
        if (link := self._link) is None:
            return
        if self._link_is_ready:
            link.send(Shutdown())
            await link.wait_dead(grace_s)
        if not link.is_dead:
            link.kill()
            await link.wait_dead(grace_s)

    def kill(self) -> None:
        """End the process without ceremony, from a signal handler too."""
        if self._link is not None:
            self._link.kill()

    def _launch(self) -> None:
        self._restart = None
        self._launched_s = time.monotonic()
        self._link_is_ready = False
        try:
            self._link = EngineLink(self._launcher, self._on_message, self._on_death)
        except OSError as error:
            self._link = None
            self._fail(f"the engine process cannot be started: {error}")

    def _on_message(self, link: EngineLink, message: FromEngine) -> None:
        if link is not self._link:
            return  # a late word of an engine that was given up
        match message:
            case StepResult() | EmbedStep():
                self._progress_s = time.monotonic()
                self._listener.engine_stepped(message)
            case TraceResult():
                self._listener.engine_traced(message)
            case DeviceReport():
                self.devices = message
            case EngineLoading(phase):
                self._on_loading(phase)
            case EngineReady(info):
                self._on_ready(info)
            case EngineFailed(reason):
                link.kill()  # it is about to exit; this makes sure that its memory comes back
                self._fail(reason)

    def _on_loading(self, phase: str) -> None:
        if self.state in (EngineState.LOADING, EngineState.RESTARTING):
            self._enter(self.state, f"{self._cause}; {phase}" if self._cause else phase)

    def _on_ready(self, info: EngineInfo) -> None:
        now_s = time.monotonic()
        self.info = info
        self.load_s = now_s - self._launched_s
        self._progress_s = now_s
        self._link_is_ready = True
        if self.state is not EngineState.DRAINING:
            self._cause = ""
            self._enter(EngineState.READY, "")
            self._listener.engine_ready()

    def _on_death(self, link: EngineLink) -> None:
        if link is not self._link:
            return
        self.devices = None
        was_ready, self._link_is_ready, self._link = self._link_is_ready, False, None
        stalled = self.state is EngineState.STALLED
        how = self.detail if stalled else describe_exit(link.handle.exitcode)
        if self.state is EngineState.FAILED:
            return
        self._listener.engine_died(was_ready)
        if self.state is EngineState.DRAINING:
            self._listener.engine_failed("the engine ended during the shutdown")
            return
        delay_s = self._budget.record_death(time.monotonic())
        if delay_s is None:
            self._fail(self._crash_loop(how))
        else:
            self._restart_in(delay_s, how)

    def _restart_in(self, delay_s: float, how: str) -> None:
        first_load = self.info is None
        state = EngineState.LOADING if first_load else EngineState.RESTARTING
        logger.warning("engine %s ended (%s); restart in %.2g s", self._name, how, delay_s)
        self._cause = f"started again after the engine ended ({how})"
        self._enter(state, self._cause)
        self._restart = asyncio.get_running_loop().call_later(delay_s, self._launch)

    def _crash_loop(self, how: str) -> str:
        return (
            f"the engine process of {self._name} ended {self._budget.num_deaths} times within "
            f"{self._policy.restart_window_s:g} s, the last time with: {how}; "
            "see the log above, then restart the server"
        )

    def _fail(self, reason: str) -> None:
        if self.state is EngineState.DRAINING:
            return
        logger.error("engine %s failed: %s", self._name, reason)
        self._enter(EngineState.FAILED, reason)
        self._listener.engine_failed(reason)

    def _enter(self, state: EngineState, detail: str) -> None:
        if detail and (state, detail) != (self.state, self.detail):
            logger.info("engine %s: %s, %s", self._name, state, detail)
        self.state = state
        self.detail = detail
        if state in (EngineState.READY, EngineState.FAILED, EngineState.DRAINING):
            self._settled.set()

    async def _watch(self) -> None:
        tick_s = min(_MAX_TICK_S, self._policy.stall_timeout_s / 4)
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(tick_s)
            now_s = time.monotonic()
            if now_s - last_s > tick_s + _SLEPT_S:
                self._progress_s = now_s
            last_s = now_s
            self._check_stall(now_s)
            self._listener.tick()

    def _check_stall(self, now_s: float) -> None:
        if self.state is not EngineState.READY or not self._listener.has_work():
            return
        silent_s = now_s - self._progress_s
        if silent_s < self._policy.stall_timeout_s or self._link is None:
            return
        self._enter(EngineState.STALLED, f"killed after {silent_s:.1f} s without a step")
        self._link.kill()
