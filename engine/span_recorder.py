"""The recorder that listens: makes spans of what the devices and threads tell it.

Filled by the loop's thread and the helper of an overlapped step, emptied between two steps. Lanes
and attention do not know that they are watched: while a trace runs, steps are given wrappers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.batch import Batch, Float32Array, Int32Array
from engine.buckets import Piece
from engine.recorder import Phases, Recorder
from engine.span import Argument, Category, Span, TeamTimes, TracedStep, lane_track

if TYPE_CHECKING:
    from engine.attention import Attend
    from engine.kv_cache import LayerPages
    from engine.lane import Lane, LaneCounters, RowBuffers, StepBuffers
    from engine.model_runner import StepLanes

ATTENTION_TRACK = "attention"


class SpanRecorder:
    """All times are those of one clock, `perf_counter`, moved once to where `time.time()` is."""

    def __init__(self) -> None:
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._spans: list[Span] = []
        self._teams: list[TeamTimes] = []
        self._watched: dict[int, TracedLane] = {}

    def take(self) -> TracedStep:
        """What was recorded since the last time."""
        taken = TracedStep(tuple(self._spans), tuple(self._teams))
        self._spans, self._teams = [], []
        return taken

    def at_ns(self, perf_s: float) -> int:
        """A time of `perf_counter` on the clock of the spans."""
        return round(perf_s * 1e9) + self._epoch_ns

    def now_ns(self) -> int:
        return time.perf_counter_ns() + self._epoch_ns

    def add(self, span: Span) -> None:
        self._spans.append(span)

    def ended(
        self, name: str, category: Category, track: str, start_ns: int, **args: Argument
    ) -> None:
        self.add(Span(name, category, track, start_ns, self.now_ns(), args))

    def called(self, graph: str, track: str, start_ns: int, piece: Piece, num_bytes: int) -> None:
        self.ended(
            graph, Category.NPU_CALL, track, start_ns,
            rows=piece.num_rows, bucket=piece.bucket, bytes=num_bytes,
        )  # fmt: skip

    def ran(
        self, phases: Phases, ticks: NDArray[np.int64], num_threads: int, start_s: float
    ) -> None:
        end_ns = self.now_ns()
        stamps = ticks[:num_threads, : 2 * len(phases) + 1].copy()
        self._teams.append(TeamTimes(phases, stamps, self.at_ns(start_s), end_ns))

    def lanes(self, lanes: StepLanes) -> StepLanes:
        return replace(
            lanes,
            segments=tuple(map(self._watch, lanes.segments)),
            last=self._watch(lanes.last),
            head=self._watch(lanes.head),
        )

    def attend(self, attend: Attend, batch: Batch) -> Attend:
        num_tokens, num_keys = batch.num_tokens, int(batch.context_lens.sum())

        def traced(qkv: Float32Array, pages: LayerPages, out: Float32Array) -> None:
            start_ns = self.now_ns()
            attend(qkv, pages, out)
            self.ended(
                "attention", Category.ATTENTION, ATTENTION_TRACK, start_ns,
                layer=pages.layer, tokens=num_tokens, keys=num_keys,
            )  # fmt: skip

        return traced

    def _watch(self, lane: Lane) -> Lane:
        """The same wrapper for the same lane: steps ask whether one lane is another."""
        if id(lane) not in self._watched:
            self._watched[id(lane)] = TracedLane(lane, self)
        return self._watched[id(lane)]


class TracedLane:
    """See `lane.Lane`. Every segment becomes a span, also one that fails."""

    def __init__(self, lane: Lane, recorder: SpanRecorder) -> None:
        self.name = lane.name
        self._lane = lane
        self._recorder = recorder
        self._track = lane_track(lane.name)
        self._num_tokens = self._num_rows = 0

    @property
    def counters(self) -> LaneCounters:
        return self._lane.counters

    def begin(self, num_tokens: int) -> StepBuffers:
        self._num_tokens = num_tokens
        return self._lane.begin(num_tokens)

    def run(self, index: int) -> None:
        with self._segment(f"segment {index}", self._num_tokens, layer=index):
            self._lane.run(index)

    def residual(self, index: int) -> Float32Array:
        return self._lane.residual(index)

    def gather(self, rows: Int32Array, into: RowBuffers) -> None:
        self._lane.gather(rows, into)

    def begin_rows(self, num_rows: int) -> RowBuffers:
        self._num_rows = num_rows
        return self._lane.begin_rows(num_rows)

    def run_last(self) -> None:
        with self._segment("last segment", self._num_rows):
            self._lane.run_last()

    def run_head(self) -> Float32Array:
        with self._segment("head", self._num_rows):
            return self._lane.run_head()

    def twin(self) -> Lane:
        return self._lane.twin()

    def record(self, recorder: Recorder) -> None:
        self._lane.record(recorder)

    def close(self) -> None:
        self._lane.close()

    @contextmanager
    def _segment(self, name: str, num_tokens: int, **args: Argument) -> Iterator[None]:
        start_ns = self._recorder.now_ns()
        try:
            yield
        finally:
            self._recorder.ended(
                name, Category.SEGMENT, self._track, start_ns,
                lane=self.name, tokens=num_tokens, **args,
            )  # fmt: skip
