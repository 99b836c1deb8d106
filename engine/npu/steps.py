"""Steps with an open NPU: which way each of them goes, and what is learnt from how long it took.

Ways: all on the CPU; the segments where their measured and observed costs say, in one piece; the
same in two halves that overlap; or a form that does the whole step on the device. Belongs to the
loop's thread. Does not retry and does not close anything: errors are the dispatcher's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np

from engine.batch import Batch, Float32Array
from engine.cost_profile import MIDDLE, CostProfile
from engine.errors import EngineError
from engine.halves import cut_batch, find_cut
from engine.lane import Lane
from engine.model_runner import LaneSteps, StepLanes
from engine.npu.guarded_lane import GuardedLane
from engine.npu.opener import OpenedNpu
from engine.npu.overflow_ledger import WHOLE_STEP
from engine.npu.watchdog import Watchdog
from engine.observed_costs import Factors, ObservedCosts, StickyChoice
from engine.overlapped_step import OverlappedStep
from engine.placement import (
    CPU,
    RowRoute,
    bucket_of,
    row_route_s,
    row_routes,
    segment_route_s,
    segment_routes,
)
from engine.recorder import Recorder
from engine.step_form import StepForm

logger = logging.getLogger(__name__)

ON_CPU, IN_ONE_PIECE, IN_HALVES = "cpu", "one piece", "halves"

_TRIALS = 3
"""Steps of a size that go each promising way before experience decides."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way through a step. `devices` are those that do matrix work in it."""

    name: str
    devices: tuple[str, ...]
    estimated_s: float
    run: Callable[[], Float32Array]

    @property
    def uses_npu(self) -> bool:
        return self.name != ON_CPU


class NpuSteps:
    """`cpu` runs whole steps on the CPU, `steps` runs them on lanes.

    `open_cpu_lane` gives the CPU's lane for steps that are divided; it is called when the first
    one is, since the lane takes memory. `may_use_cpu` False: all matrix work is the NPU's, whatever
    it costs. `can_overlap` False: every step in one piece.
    """

    def __init__(
        self,
        steps: LaneSteps,
        cpu: StepForm,
        open_cpu_lane: Callable[[], GuardedLane],
        opened: OpenedNpu,
        watchdog: Watchdog | None,
        may_use_cpu: bool = True,
        can_overlap: bool = True,
    ) -> None:
        self.opened = opened
        self._num_layers = len(steps.cache.layers)
        self.lane = GuardedLane(opened.forms.lane, self._num_layers, watchdog)
        self.banned: frozenset[int] = frozenset()
        """Segments that the NPU may not run; L + 1 is the head. See `overflow_ledger.py`."""

        self._steps = steps
        self._cpu = cpu
        self._open_cpu_lane = open_cpu_lane
        self._lanes: dict[str, GuardedLane] = {self.lane.name: self.lane}
        self._lacks_cpu_lane = False
        self._watchdog = watchdog
        self._may_use_cpu = may_use_cpu
        self._overlapped = OverlappedStep(steps) if can_overlap else None
        self._known = (
            _Known(opened.profile, self.lane.name, may_use_cpu) if opened.profile else None
        )
        self._factors = Factors()
        self._routes_choice = StickyChoice()
        self._ways_choice = StickyChoice(_TRIALS)
        self._gone: set[tuple[str, int]] = set()
        self._wait_s = 0.0

    def choose(self, batch: Batch) -> Way:
        """The way that is expected to be fastest; now and then another, to see."""
        ways = self._ways(batch)
        bucket = bucket_of(batch.num_tokens)
        costs = [self._corrected_s(way, bucket) for way in ways]
        question = ("way", bucket, *(way.name for way in ways))
        return ways[self._ways_choice.choose(question, costs)]

    def execute(self, way: Way, batch: Batch) -> Float32Array:
        """Raises LaneFailed, or what a form of whole steps raises."""
        for lane in self._lanes.values():
            lane.meter.take()  # what a step that failed has left
        start_s = perf_counter()
        logits = way.run()
        self._learn(way, batch, perf_counter() - start_s)
        return logits

    def observe_wait(self, seconds: float) -> None:
        """How long a step waited for the NPU: what other processes do with it has a price, too."""
        self._wait_s += 0.1 * (seconds - self._wait_s)

    def record(self, recorder: Recorder) -> None:
        """From now on tells it of all calls into the NPU."""
        self.opened.forms.record(recorder)

    def close(self) -> None:
        if self._overlapped is not None:
            self._overlapped.close()
        self.opened.forms.close()

    def _corrected_s(self, way: Way, bucket: int) -> float:
        seconds = way.estimated_s * (self._factors.get((way.name, bucket)) or 1.0)
        return seconds + self._wait_s if way.uses_npu else seconds

    def _ways(self, batch: Batch) -> list[Way]:
        known = self._known
        if known is None:
            run = partial(
                self._steps.execute_on, StepLanes.all_on(self.lane, self._num_layers), batch
            )
            return [Way(IN_ONE_PIECE, (self.lane.name,), 1.0, run)]
        profile = known.profile
        num_tokens, num_rows = batch.num_tokens, len(batch.logits_rows)
        attention = self._attention_factor() * profile.sequence_attention_s(batch)
        attention_s = self._num_layers * float(attention.sum())
        ways = []
        if self._may_use_cpu:
            on_cpu_s = profile.cpu_step_s(num_tokens, num_rows) + attention_s
            ways.append(Way(ON_CPU, (CPU,), on_cpu_s, partial(self._cpu.execute, batch)))
        names, matrix_s = known.route(num_tokens, num_rows, self._routes_choice)
        lanes = self._lanes_for(names)
        if lanes is None:
            return ways
        devices = _devices(lanes, num_rows)
        if devices != (CPU,) or not ways:
            run = partial(self._steps.execute_on, lanes, batch)
            seconds = matrix_s + attention_s
            ways.append(Way(IN_ONE_PIECE, devices, seconds, run))
            ways += self._halves(known, batch, lanes, devices, attention, seconds)
        return ways + self._whole(profile, batch)

    def _whole(self, profile: CostProfile, batch: Batch) -> list[Way]:
        longest = int(batch.context_lens.max(initial=0))
        return [
            Way(
                form.name,
                (self.lane.name,),
                profile.whole[form.name].seconds(batch.num_tokens, longest),
                self._watched(form, batch),
            )
            for form in self.opened.forms.whole
            if form.name in profile.whole and form.fits(batch) and WHOLE_STEP not in self.banned
        ]

    def _lanes_for(self, names: Sequence[str]) -> StepLanes | None:
        """`names` of segments 0 to L and the head. None: they need the CPU's lane; there is none.

        Then the step is the CPU's own form's.
        """
        names = [CPU if i in self.banned else name for i, name in enumerate(names)]
        if CPU in names and CPU not in self._lanes and not self._try_cpu_lane():
            return None
        lanes: list[Lane] = [self._lanes[name] for name in names]
        return StepLanes(tuple(lanes[:-2]), *lanes[-2:])

    def _try_cpu_lane(self) -> bool:
        if self._lacks_cpu_lane or not self._may_use_cpu:
            return False
        try:
            self._lanes[CPU] = self._open_cpu_lane()
        except EngineError as error:  # some models have no graphs for it
            logger.warning("steps cannot be divided, for the CPU's lane fails: %s", error)
            self._lacks_cpu_lane = True
        return not self._lacks_cpu_lane

    def _halves(
        self,
        known: _Known,
        batch: Batch,
        lanes: StepLanes,
        devices: tuple[str, ...],
        attention: np.ndarray,
        serial_s: float,
    ) -> list[Way]:
        """None or one: the halves run beside each other only if the segments are the NPU's."""
        overlapped = self._overlapped
        if overlapped is None or any(lane is not self.lane for lane in lanes.segments[1:]):
            return []
        cut = find_cut(
            batch,
            attention,
            lambda num_tokens: known.costs.seconds(self.lane.name, MIDDLE, num_tokens),
            known.profile.handover_s,
            self._num_layers,
        )
        if cut is None:
            return []

        def run() -> Float32Array:
            return overlapped.execute(lanes, *cut_batch(batch, cut.token))

        seconds = serial_s + cut.overlapped_s - cut.serial_s
        return [Way(IN_HALVES, devices, seconds, run)]

    def _watched(self, form: StepForm, batch: Batch) -> Callable[[], Float32Array]:
        def run() -> Float32Array:
            if self._watchdog is None:
                return form.execute(batch)
            self._watchdog.enter(f"a step of {batch.num_tokens} tokens on {form.name}")
            try:
                return form.execute(batch)
            finally:
                self._watchdog.leave()

        return run

    def _attention_factor(self) -> float:
        return self._factors.get("attention") or 1.0

    def _learn(self, way: Way, batch: Batch, seconds: float) -> None:
        known = self._known
        key = (way.name, bucket_of(batch.num_tokens))
        if known is None or key not in self._gone:
            self._gone.add(key)  # the first time includes what is made once
            return
        lanes_s = 0.0
        for name, lane in self._lanes.items():
            for kind, num_rows, call_s, num_calls in lane.meter.take():
                lanes_s += call_s * num_calls
                if name in known.profile.lanes:
                    known.costs.observe(name, kind, num_rows, call_s)
        expected_s = self._num_layers * known.profile.attention_s(batch)
        if way.name in (ON_CPU, IN_ONE_PIECE) and lanes_s > 0 and expected_s > 0:
            self._factors.observe("attention", max(seconds - lanes_s, 0.0) / expected_s)
        self._factors.observe(key, seconds / way.estimated_s)


class _Known:
    """What is known of the costs, and where the segments go by it."""

    def __init__(self, profile: CostProfile, npu: str, may_use_cpu: bool) -> None:
        allowed = (CPU, npu) if may_use_cpu else (npu,)
        names = tuple(name for name in allowed if name in profile.lanes)
        self.profile = profile
        self.costs = ObservedCosts(profile)
        self._segment_routes = segment_routes(names)
        self._row_routes = row_routes(names)

    def route(
        self, num_tokens: int, num_rows: int, choice: StickyChoice
    ) -> tuple[list[str], float]:
        """Names of the lanes of segments 0 to L and the head; the estimated seconds of them all."""
        cost, profile = self.costs.seconds, self.profile
        costs = [segment_route_s(r, num_tokens, profile, cost) for r in self._segment_routes]
        chosen = choice.choose(("segments", bucket_of(num_tokens)), costs)
        segments, seconds = self._segment_routes[chosen], costs[chosen]
        rows = RowRoute(segments.middle, segments.middle)
        if num_rows:
            costs = [row_route_s(r, num_rows, profile, cost) for r in self._row_routes]
            chosen = choice.choose(("rows", bucket_of(num_rows)), costs)
            rows, seconds = self._row_routes[chosen], seconds + costs[chosen]
        middle = [segments.middle] * (profile.num_layers - 1)
        return [segments.first, *middle, rows.last, rows.head], seconds


def _devices(lanes: StepLanes, num_rows: int) -> tuple[str, ...]:
    """Names of all lanes that a step uses, the NPU's first."""
    used = [*lanes.segments, *((lanes.last, lanes.head) if num_rows else ())]
    return tuple(sorted({lane.name for lane in used}, key=lambda name: name == CPU))
