"""A lane that is watched: what its calls cost, that they come back, and which one failed.

Wraps any lane. Knows no policy: it measures, and says where an error came from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TypeVar

from engine.batch import Float32Array, Int32Array
from engine.cost_profile import FIRST, HEAD, LAST, MIDDLE
from engine.errors import DeviceError
from engine.lane import Lane, LaneCounters, RowBuffers, StepBuffers
from engine.npu.watchdog import Watchdog
from engine.recorder import Recorder

T = TypeVar("T")


class LaneFailed(DeviceError):
    """A lane raised in segment `segment` (L + 1: the head); `__cause__` is what it raised."""

    def __init__(self, lane: str, segment: int, cause: DeviceError) -> None:
        super().__init__(str(cause))
        self.lane = lane
        self.segment = segment
        self.cause = cause


class LaneMeter:
    """Seconds and calls by (kind of segment, rows), since they were last taken."""

    def __init__(self) -> None:
        self._seconds: defaultdict[tuple[str, int], float] = defaultdict(float)
        self._calls: defaultdict[tuple[str, int], int] = defaultdict(int)

    def add(self, kind: str, num_rows: int, seconds: float) -> None:
        self._seconds[kind, num_rows] += seconds
        self._calls[kind, num_rows] += 1

    def take(self) -> list[tuple[str, int, float, int]]:
        """(kind, rows, seconds of one call, calls), and begins again."""
        taken = [
            (kind, rows, total / self._calls[kind, rows], self._calls[kind, rows])
            for (kind, rows), total in self._seconds.items()
        ]
        self._seconds.clear()
        self._calls.clear()
        return taken


class GuardedLane:
    """See `lane.Lane`. Its twins share its meter and its watchdog."""

    def __init__(
        self,
        lane: Lane,
        num_layers: int,
        watchdog: Watchdog | None = None,
        meter: LaneMeter | None = None,
    ) -> None:
        self.name = lane.name
        self.meter = meter or LaneMeter()
        self._lane = lane
        self._num_layers = num_layers
        self._watchdog = watchdog
        self._num_tokens = 0
        self._num_rows = 0

    @property
    def counters(self) -> LaneCounters:
        return self._lane.counters

    def begin(self, num_tokens: int) -> StepBuffers:
        self._num_tokens = num_tokens
        return self._lane.begin(num_tokens)

    def run(self, index: int) -> None:
        kind = MIDDLE if index else FIRST
        self._guarded(partial(self._lane.run, index), index, kind, self._num_tokens)

    def residual(self, index: int) -> Float32Array:
        return self._lane.residual(index)

    def gather(self, rows: Int32Array, into: RowBuffers) -> None:
        self._lane.gather(rows, into)

    def begin_rows(self, num_rows: int) -> RowBuffers:
        self._num_rows = num_rows
        return self._lane.begin_rows(num_rows)

    def run_last(self) -> None:
        self._guarded(self._lane.run_last, self._num_layers, LAST, self._num_rows)

    def run_head(self) -> Float32Array:
        return self._guarded(self._lane.run_head, self._num_layers + 1, HEAD, self._num_rows)

    def twin(self) -> GuardedLane:
        return GuardedLane(self._lane.twin(), self._num_layers, self._watchdog, self.meter)

    def record(self, recorder: Recorder) -> None:
        self._lane.record(recorder)

    def close(self) -> None:
        self._lane.close()

    def _guarded(self, call: Callable[[], T], segment: int, kind: str, num_rows: int) -> T:
        watchdog = self._watchdog
        if watchdog is not None:
            watchdog.enter(f"{kind} segment {segment} on {self.name}")
        start_s = perf_counter()
        try:
            result = call()
        except DeviceError as error:
            raise LaneFailed(self.name, segment, error) from error
        finally:
            if watchdog is not None:
                watchdog.leave()
        self.meter.add(kind, num_rows, perf_counter() - start_s)
        return result
