"""A device that is not there: its results are the CPU lane's to the bit, its times and faults ours.

`SimulatedLane` computes on a real `CpuLane`, then sleeps, with the interpreter lock released, until
the call has taken as long as it should. `Faults` raise, or hang, at a place that a test names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.batch import Float32Array, Int32Array
from engine.cost_profile import FIRST, HEAD, LAST, MIDDLE, CostProfile, LaneCosts, Points
from engine.lane import Lane, LaneCounters, RowBuffers, StepBuffers
from engine.npu.opener import OpenedNpu, OpenNpu
from engine.recorder import NO_RECORDER, Recorder
from engine.step_form import NpuForms

CallCost = Callable[[str, int], float]
"""(kind of segment, rows) → seconds of the call."""


def no_cost(kind: str, num_rows: int) -> float:
    return 0.0


@dataclass(frozen=True)
class Place:
    """Where in a step: segment L is `last`, L + 1 the head; `is_second` in the second half."""

    segment: int
    is_second: bool = False


@dataclass
class Faults:
    """What goes wrong: at the n-th passing of `place` (from 0), `act` is called once."""

    place: Place | None = None
    act: Callable[[], None] = lambda: None
    nth: int = 0
    num_passed: int = 0
    num_acted: int = 0

    def pass_by(self, place: Place) -> None:
        if place != self.place:
            return
        self.num_passed += 1
        if self.num_passed == self.nth + 1:
            self.num_acted += 1
            self.act()


def raising(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@dataclass
class Device:
    """What all lanes and twins of one simulated device share."""

    num_layers: int
    cost: CallCost = no_cost
    faults: Faults = field(default_factory=Faults)
    num_calls: int = 0
    num_closed: int = 0
    recorder: Recorder = NO_RECORDER
    is_busy: threading.Lock = field(default_factory=threading.Lock)

    def call(self, place: Place, num_rows: int, compute: Callable[[], None]) -> None:
        """A second call while one runs is the error that a real device answers with a reset."""
        assert self.is_busy.acquire(blocking=False), "two calls into one device at the same time"
        try:
            until_s = time.perf_counter() + self.cost(self._kind(place.segment), num_rows)
            self.num_calls += 1
            self.faults.pass_by(place)
            compute()
            if (left_s := until_s - time.perf_counter()) > 0:
                time.sleep(left_s)
        finally:
            self.is_busy.release()

    def _kind(self, segment: int) -> str:
        if segment >= self.num_layers:
            return LAST if segment == self.num_layers else HEAD
        return MIDDLE if segment else FIRST


class SimulatedLane:
    """See `lane.Lane`. `lane` is the CPU lane, or twin, that computes."""

    def __init__(
        self, lane: Lane, device: Device, name: str = "npu", is_second: bool = False
    ) -> None:
        self.name = name
        self._lane = lane
        self._device = device
        self._is_second = is_second
        self._num_tokens = 0
        self._num_rows = 0

    @property
    def counters(self) -> LaneCounters:
        calls = self._device.num_calls
        return LaneCounters(num_calls=calls, copied_bytes=1_000 * calls)

    def begin(self, num_tokens: int) -> StepBuffers:
        self._num_tokens = num_tokens
        return self._lane.begin(num_tokens)

    def run(self, index: int) -> None:
        place = Place(index, self._is_second)
        self._device.call(place, self._num_tokens, lambda: self._lane.run(index))

    def residual(self, index: int) -> Float32Array:
        return self._lane.residual(index)

    def gather(self, rows: Int32Array, into: RowBuffers) -> None:
        self._lane.gather(rows, into)

    def begin_rows(self, num_rows: int) -> RowBuffers:
        self._num_rows = num_rows
        return self._lane.begin_rows(num_rows)

    def run_last(self) -> None:
        self._device.call(Place(self._device.num_layers), self._num_rows, self._lane.run_last)

    def run_head(self) -> Float32Array:
        logits: list[Float32Array] = []
        place = Place(self._device.num_layers + 1)
        self._device.call(place, self._num_rows, lambda: logits.append(self._lane.run_head()))
        return logits[0]

    def twin(self) -> SimulatedLane:
        return SimulatedLane(self._lane.twin(), self._device, self.name, is_second=True)

    def record(self, recorder: Recorder) -> None:
        self._device.recorder = recorder

    def close(self) -> None:
        self._device.num_closed += 1


def flat(seconds: float) -> Points:
    """The same cost for every number of rows."""
    return ((1, seconds), (1024, seconds))


def profile(
    num_layers: int,
    npu_s: float = 1e-6,
    cpu_s: float = 1e-3,
    attention_s: float = 1e-6,
    handover_s: float = 1e-5,
    name: str = "npu",
) -> CostProfile:
    """All segments of a lane cost the same; by default the NPU is always the cheaper one."""

    def costs(seconds: float) -> LaneCosts:
        segments = {kind: flat(seconds) for kind in (FIRST, MIDDLE, LAST, HEAD)}
        return LaneCosts(seconds / 2, segments, is_bucketed=False)

    return CostProfile(
        num_layers=num_layers,
        hidden_size=64,
        cpu_step=flat(cpu_s * (num_layers + 2)),
        cpu_rows=flat(1e-9),
        lanes={"cpu": costs(cpu_s), name: costs(npu_s)},
        decode_attention=flat(attention_s),
        chunk_attention=flat(attention_s),
        copy_bytes_per_s=1e10,
        handover_s=handover_s,
        whole={},
    )


def opening(lane: Lane, device: Device, costs: CostProfile) -> OpenNpu:
    """An opener that always succeeds; each time with a lane of its own over `lane`."""

    def open_npu(on_phase: Callable[[str], None]) -> OpenedNpu:
        on_phase("opening the simulated device")
        return OpenedNpu(NpuForms(SimulatedLane(lane, device)), costs, "simulated")

    return open_npu
