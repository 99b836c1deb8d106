"""One step of the model: embedding, then segment, attention, segment, attention, …, head.

The tokens of all sequences travel together; which sequence a token belongs to matters to the
attention only. Any lane may run any segment: where it changes, the residual is copied. Knows no
requests, draws no tokens, and is told which lane runs what (`dispatcher.py` decides).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.attention import Attention
from engine.batch import Batch, Float32Array, Int32Array
from engine.embedding import Embedding
from engine.kv_cache import PagedKVCache
from engine.lane import Lane, LaneCounters, RowBuffers
from engine.recorder import NO_RECORDER, Recorder


@dataclass(frozen=True, slots=True)
class StepLanes:
    """Who runs what: `segments` 0 to L - 1, then segment L (`last`) and the head over the rows."""

    segments: tuple[Lane, ...]
    last: Lane
    head: Lane

    @classmethod
    def all_on(cls, lane: Lane, num_layers: int) -> StepLanes:
        return cls((lane,) * num_layers, lane, lane)


class LaneSteps:
    """Steps on whatever lanes it is told. Not thread-safe: one per loop thread."""

    def __init__(self, attention: Attention, embedding: Embedding, cache: PagedKVCache) -> None:
        self.attention = attention
        self.embedding = embedding
        self.cache = cache
        self.recorder: Recorder = NO_RECORDER

    def record(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def execute_on(self, lanes: StepLanes, batch: Batch) -> Float32Array:
        """Logits [R, V] float32 of `batch.logits_rows`, valid until the next call.

        Writes keys and values of all tokens to their slots. Raises DeviceError; the slots then
        hold garbage, and executing the batch again mends that.
        """
        lanes = self.recorder.lanes(lanes)
        for _ in self.pieces(lanes, batch):
            pass
        return run_rows(lanes, [(lanes.segments[-1], batch.logits_rows)])

    def pieces(self, lanes: StepLanes, batch: Batch) -> Iterator[None]:
        """Segment 0, attention 0, segment 1, … attention L - 1: each `next` computes one of them.

        Two steps may be in pieces at the same time, on lanes that are twins. Raises DeviceError.
        """
        lane = lanes.segments[0]
        buffers = lane.begin(batch.num_tokens)
        self.embedding.lookup(batch.token_ids, buffers.hidden)
        attend = self.recorder.attend(self.attention.begin(batch), batch)
        for i, pages in enumerate(self.cache.layers):
            lane.run(i)
            yield
            following = lanes.segments[min(i + 1, len(lanes.segments) - 1)]
            others = buffers if following is lane else following.begin(batch.num_tokens)
            attend(buffers.qkv, pages, others.attention)
            if following is not lane:
                np.copyto(following.residual(i + 1), lane.residual(i + 1))
                lane, buffers = following, others
            yield


class ModelRunner(LaneSteps):
    """A `StepForm`: every step on one lane."""

    def __init__(
        self, lane: Lane, attention: Attention, embedding: Embedding, cache: PagedKVCache
    ) -> None:
        super().__init__(attention, embedding, cache)
        self.lane = lane
        self._lanes = StepLanes.all_on(lane, len(cache.layers))

    @property
    def name(self) -> str:
        return self.lane.name

    @property
    def counters(self) -> LaneCounters:
        return self.lane.counters

    def fits(self, batch: Batch) -> bool:
        return True

    def interrupt(self) -> None:
        """It goes on: its steps are short calls into sessions."""

    def close(self) -> None:
        self.lane.close()

    def execute(self, batch: Batch) -> Float32Array:
        """See `StepForm.execute`."""
        return self.execute_on(self._lanes, batch)


def run_rows(lanes: StepLanes, parts: Sequence[tuple[Lane, Int32Array]]) -> Float32Array:
    """Segment L and the head over rows of the steps of one or more lanes: logits [R, V].

    `parts`: lanes that have run a step, each with the rows [R'] of it that are wanted.
    """
    num_rows = sum(len(rows) for _, rows in parts)
    if num_rows == 0:
        return np.empty((0, 0), np.float32)
    buffers = lanes.last.begin_rows(num_rows)
    start = 0
    for lane, rows in parts:
        end = start + len(rows)
        lane.gather(rows, _between(buffers, start, end) if len(parts) > 1 else buffers)
        start = end
    lanes.last.run_last()
    if lanes.head is not lanes.last:
        np.copyto(lanes.head.begin_rows(num_rows).final, buffers.final)
    return lanes.head.run_head()


def _between(buffers: RowBuffers, start: int, end: int) -> RowBuffers:
    return RowBuffers(
        buffers.hidden[start:end], buffers.attention[start:end], buffers.final[start:end]
    )
