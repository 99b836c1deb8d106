"""Which device runs a step, and what happens when it fails: the runner that the step loop is given.

With `--device auto` the CPU computes whatever the NPU cannot: while it is being opened, when it
pays, and when it fails. A step that failed is computed again on the CPU, the NPU is closed and
opened again after a back-off, and all of that is declared on the board. With `--device npu` a step
waits for the NPU instead, for a bounded time, and is then refused with the reason. Either way
nothing of a failed step is visible: it has only written slots that the retry writes again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from engine.batch import Batch, Float32Array
from engine.device_board import DeviceBoard
from engine.errors import DeviceError, DeviceOverflow, DeviceUnavailable, EngineError
from engine.lane_usage import LaneUsage, Usage
from engine.model_runner import LaneSteps
from engine.npu.fault_memory import FaultMemory
from engine.npu.guarded_lane import GuardedLane, LaneFailed
from engine.npu.lane_gate import MAX_BACK_OFF_S, GateState, LaneGate
from engine.npu.opener import NpuOpener, OpenedNpu
from engine.npu.overflow_ledger import WHOLE_STEP, OverflowLedger
from engine.npu.steps import NpuSteps, Way
from engine.npu.watchdog import Watchdog
from engine.placement import CPU, lane_table
from engine.recorder import NO_RECORDER, Recorder
from engine.span import Category, lane_track
from engine.step_form import StepForm

logger = logging.getLogger(__name__)


class CpuDispatcher:
    """For an engine that has the CPU only: no choice, no thread, no clock."""

    def __init__(self, cpu: StepForm) -> None:
        self._cpu = cpu
        self._num_steps = 0
        self._num_tokens = 0

    @property
    def usage(self) -> Usage:
        lane = LaneUsage(CPU, self._num_steps, self._num_tokens, 0, self._cpu.counters.copied_bytes)
        return Usage((CPU,), (lane,))

    def interrupt(self) -> None:
        self._cpu.interrupt()

    def record(self, recorder: Recorder) -> None:
        self._cpu.record(recorder)

    def execute(self, batch: Batch) -> Float32Array:
        """See `StepForm.execute`."""
        logits = self._cpu.execute(batch)
        self._num_steps += 1
        self._num_tokens += batch.num_tokens
        return logits


@dataclass(frozen=True, slots=True)
class NpuPolicy:
    """`is_strict`: the CPU may not take the NPU's place; a step waits up to `max_wait_s` for it."""

    is_strict: bool
    max_wait_s: float = 30.0
    can_overlap: bool = True


class Dispatcher:
    """Belongs to the loop's thread. `lease` is held for every step that goes to the NPU."""

    def __init__(
        self,
        lane_steps: LaneSteps,
        cpu: StepForm,
        open_cpu_lane: Callable[[], GuardedLane],
        name: str,
        opener: NpuOpener,
        board: DeviceBoard,
        policy: NpuPolicy,
        lease: AbstractContextManager[None],
        watchdog: Watchdog | None = None,
        memory: FaultMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lane_steps, self._cpu, self._open_cpu_lane = lane_steps, cpu, open_cpu_lane
        self._name = name
        self._opener = opener
        self._board = board
        self._policy = policy
        self._lease = lease
        self._watchdog = watchdog
        self._memory = memory
        self._clock = clock
        self._sleep: Callable[[float], None] = time.sleep
        self._num_layers = len(lane_steps.cache.layers)
        self._gate = LaneGate()
        self._ledger = OverflowLedger(self._num_layers + 2)
        self._recorder: Recorder = NO_RECORDER
        self._steps: NpuSteps | None = None
        self._has_been_open = False
        self._refuse_until_s = float("-inf")
        self._devices: tuple[str, ...] = (CPU,)
        self._num_steps: Counter[str] = Counter()
        self._num_tokens: Counter[str] = Counter()
        self._copied_bytes: Counter[str] = Counter()  # by lanes that are closed
        self._remember_hang()

    @property
    def usage(self) -> Usage:
        open_bytes = self._steps.lane.counters.copied_bytes if self._steps is not None else 0
        npu = LaneUsage(
            self._name,
            self._num_steps[self._name],
            self._num_tokens[self._name],
            self._gate.num_faults,
            self._copied_bytes[self._name] + open_bytes,
        )
        copied_bytes = self._cpu.counters.copied_bytes
        cpu = LaneUsage(CPU, self._num_steps[CPU], self._num_tokens[CPU], 0, copied_bytes)
        return Usage(self._devices, (npu, cpu))

    @property
    def has_been_open(self) -> bool:
        """Whether the NPU was open at any time."""
        return self._has_been_open

    def open(self) -> None:
        """Begins to open the NPU, and in strict mode waits for it: that is part of loading then.

        Raises what opening it raised, if nothing else may be used.
        """
        if not self._policy.is_strict:
            self._begin_opening()
            return
        while self._gate.state is not GateState.OPEN:
            self._gate.retry_at_s = float("-inf")
            self._begin_opening()
            self._opener.wait()
            result = self._opener.take()
            if isinstance(result, EngineError):
                raise result
            self._take(result)

    def execute(self, batch: Batch) -> Float32Array:
        """See `StepForm.execute`. Raises DeviceUnavailable in strict mode without the NPU."""
        if self._policy.is_strict:
            return self._execute_strictly(batch)
        steps = self._open_steps()
        if steps is None:
            return self._on_cpu(batch)
        way = steps.choose(batch)
        try:
            return self._go(steps, way, batch)
        except (LaneFailed, DeviceError, DeviceUnavailable) as error:
            if not self._is_npus(way, error):
                raise
            self._note_fault(steps, error)
        return self._on_cpu(batch)

    def interrupt(self) -> None:
        """Of a step on the CPU; one that has begun on the NPU goes on."""
        self._cpu.interrupt()

    def record(self, recorder: Recorder) -> None:
        """From now on tells the recorder what the steps do, on whatever device."""
        self._recorder = recorder
        self._cpu.record(recorder)
        self._lane_steps.record(recorder)
        if self._steps is not None:
            self._steps.record(recorder)

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()
        if self._watchdog is not None:
            self._watchdog.close()

    def _execute_strictly(self, batch: Batch) -> Float32Array:
        until_s = self._clock() + self._policy.max_wait_s
        while True:
            steps = self._wait_for_steps(until_s)
            way = steps.choose(batch)
            try:
                return self._go(steps, way, batch)
            except (LaneFailed, DeviceError, DeviceUnavailable) as error:
                if not self._is_npus(way, error):
                    raise
                if _is_overflow(error):
                    raise  # it would overflow again, and nothing else may compute it
                self._note_fault(steps, error)

    def _go(self, steps: NpuSteps, way: Way, batch: Batch) -> Float32Array:
        if not way.uses_npu:
            logits = steps.execute(way, batch)
        else:
            asked_s, asked_ns = self._clock(), self._recorder.now_ns()
            with self._lease:
                track = lane_track(self._name)
                self._recorder.ended("turn on the NPU", Category.WAIT, track, asked_ns)
                steps.observe_wait(self._clock() - asked_s)
                logits = steps.execute(way, batch)
        self._account(way.devices, batch)
        if self._memory is not None and self._gate.is_steady(self._clock()):
            self._memory.forget()
            self._memory = None
        return logits

    def _on_cpu(self, batch: Batch) -> Float32Array:
        logits = self._cpu.execute(batch)
        self._account((CPU,), batch)
        return logits

    def _account(self, devices: tuple[str, ...], batch: Batch) -> None:
        self._devices = devices
        for name in devices:
            self._num_steps[name] += 1
            self._num_tokens[name] += batch.num_tokens

    def _open_steps(self) -> NpuSteps | None:
        """The open NPU, if there is one now. Takes one that was opened, begins one that is due."""
        if self._gate.state is GateState.OPENING and (result := self._opener.take()) is not None:
            self._take(result)
        if self._gate.is_due(self._clock()):
            self._begin_opening()
        return self._steps

    def _wait_for_steps(self, until_s: float) -> NpuSteps:
        """Raises DeviceUnavailable when it is not open in time, and at once for a while after."""
        while (steps := self._open_steps()) is None:
            now_s = self._clock()
            if now_s < self._refuse_until_s or now_s >= until_s:
                self._refuse_until_s = max(self._refuse_until_s, now_s + self._policy.max_wait_s)
                raise DeviceUnavailable(
                    f"the NPU is {self._gate.state} and --device {self._name} allows nothing else: "
                    f"{self._gate.reason}"
                )
            if self._gate.state is GateState.OPENING:
                self._opener.wait(until_s - now_s)
            else:
                self._sleep(min(until_s, self._gate.retry_at_s) - now_s)
        self._refuse_until_s = float("-inf")
        return steps

    def _begin_opening(self) -> None:
        if not self._gate.is_due(self._clock()):
            return
        self._gate.begin_opening()
        again = f" again after: {self._gate.reason}" if self._gate.num_faults else ""
        self._board.set_lane(self._name, GateState.OPENING, f"opening it{again}")
        self._opener.begin()

    def _take(self, result: OpenedNpu | EngineError | None) -> None:
        assert result is not None, "only a result is taken"
        if isinstance(result, EngineError):
            self._closed(self._gate.failed(self._clock(), str(result)))
            return
        self._steps = NpuSteps(
            self._lane_steps,
            self._cpu,
            self._open_cpu_lane,
            result,
            self._watchdog,
            may_use_cpu=not self._policy.is_strict,
            can_overlap=self._policy.can_overlap,
        )
        self._steps.banned = self._ledger.banned
        self._steps.record(self._recorder)
        self._has_been_open = True
        self._gate.opened(self._clock(), result.note)
        plan = self._plan(result)
        logger.info("%s is open (%s); plan: %s", self._name, result.note, plan)
        self._board.set_lane(self._name, GateState.OPEN, self._open_detail(), plan)

    def _plan(self, opened: OpenedNpu) -> str:
        """What runs where, in words."""
        if opened.profile is None or self._policy.is_strict:
            return f"all matrix work on {self._name}, as was asked for"
        return lane_table(opened.profile, self._name).reason

    def _is_npus(self, way: Way, error: EngineError) -> bool:
        """Whether it is the NPU that failed: a step may use both."""
        return way.uses_npu and not (isinstance(error, LaneFailed) and error.lane == CPU)

    def _note_fault(self, steps: NpuSteps, error: EngineError) -> None:
        if _is_overflow(error):
            self._note_overflow(steps, error)
            return
        self._drop(steps)
        self._closed(self._gate.failed(self._clock(), _in_words(error)))

    def _note_overflow(self, steps: NpuSteps, error: EngineError) -> None:
        """The device is in order; but a segment that overflows again is no longer given to it."""
        logger.warning("fp16 overflow on %s, computing the step again: %s", self._name, error)
        segment = error.segment if isinstance(error, LaneFailed) else WHOLE_STEP
        if not self._ledger.record(segment):
            return
        steps.banned = self._ledger.banned
        if self._ledger.is_hopeless:
            self._drop(steps)
            num_banned = len(steps.banned - {WHOLE_STEP})
            many = f"fp16 overflow in {num_banned} of {self._num_layers + 2} segments"
            self._gate.close(self._clock(), many, MAX_BACK_OFF_S)
            self._closed(MAX_BACK_OFF_S)
            return
        logger.warning("from now on %s", self._ledger.in_words())
        self._board.set_lane(self._name, GateState.OPEN, self._open_detail())

    def _open_detail(self) -> str:
        exceptions = self._ledger.in_words()
        return f"{self._gate.reason}; {exceptions}" if exceptions else self._gate.reason

    def _drop(self, steps: NpuSteps) -> None:
        self._copied_bytes[self._name] += steps.lane.counters.copied_bytes
        self._steps = None
        try:
            steps.close()
        except DeviceError as error:  # it is broken; that it cannot be closed either is no news
            logger.info("closing %s failed too: %s", self._name, error)

    def _closed(self, back_off_s: float) -> None:
        instead = "requests wait for it" if self._policy.is_strict else "the CPU computes instead"
        logger.warning(
            "%s is closed for %.0f s, %s: %s", self._name, back_off_s, instead, self._gate.reason
        )
        detail = f"{self._gate.reason}; tried again in {back_off_s:.0f} s, {instead}"
        self._board.set_lane(self._name, GateState.CLOSED, detail)

    def _remember_hang(self) -> None:
        """An earlier process ended itself in a call: begin closed, for longer each time."""
        hang = self._memory.last_hang() if self._memory is not None else None
        if hang is None:
            return
        left_s = hang.time_s + hang.back_off_s - time.time()
        if left_s <= 0:
            return
        reason = f"an engine before this one ended itself: {hang.reason}"
        self._gate.close(self._clock(), reason, left_s)
        self._closed(left_s)


def _is_overflow(error: EngineError) -> bool:
    cause = error.cause if isinstance(error, LaneFailed) else error
    return isinstance(cause, DeviceOverflow)


def _in_words(error: EngineError) -> str:
    cause = error.cause if isinstance(error, LaneFailed) else error
    return f"{type(cause).__name__}: {cause}"
