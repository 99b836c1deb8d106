"""The check at start finds a machine whose matrix kernels are not batch-invariant."""

from __future__ import annotations

import numpy as np
import pytest

from engine.batch import Float32Array, Int32Array
from engine.bundle import Bundle
from engine.lane import CpuLane, LaneCounters, RowBuffers, StepBuffers
from engine.recorder import Recorder
from engine.self_test import is_batch_invariant

HIDDEN, QKV, VOCAB = 8, 12, 20


class FakeLane:
    """A lane of two random matrices; `noise(number of tokens)` is added to what they give."""

    name = "fake"
    counters = LaneCounters()

    def __init__(self, qkv_noise: dict[int, float], logits_noise: dict[int, float]) -> None:
        rng = np.random.default_rng(0)
        self._qkv = rng.standard_normal((HIDDEN, QKV), np.float32)
        self._head = rng.standard_normal((HIDDEN, VOCAB), np.float32)
        self._qkv_noise, self._logits_noise = qkv_noise, logits_noise
        self._step = StepBuffers(*(np.zeros((0, 0), np.float32) for _ in range(3)))

    def begin(self, num_tokens: int) -> StepBuffers:
        sizes = (HIDDEN, QKV, HIDDEN)
        self._step = StepBuffers(*(np.zeros((num_tokens, size), np.float32) for size in sizes))
        return self._step

    def run(self, index: int) -> None:
        for row, hidden in zip(self._step.qkv, self._step.hidden, strict=True):
            noise = self._qkv_noise.get(len(self._step.hidden), 0.0)
            row[:] = hidden @ self._qkv + np.float32(noise)

    def residual(self, index: int) -> Float32Array:
        return self._step.hidden

    def gather(self, rows: Int32Array, into: RowBuffers) -> None:
        into.hidden[:] = self._step.hidden[rows]

    def begin_rows(self, num_rows: int) -> RowBuffers:
        self._rows = RowBuffers(*(np.zeros((num_rows, HIDDEN), np.float32) for _ in range(3)))
        return self._rows

    def run_last(self) -> None:
        self._rows.final[:] = self._rows.hidden

    def run_head(self) -> Float32Array:
        noise = np.float32(self._logits_noise.get(len(self._step.hidden), 0.0))
        return np.array([row @ self._head + noise for row in self._rows.final])

    def twin(self) -> FakeLane:
        return FakeLane(self._qkv_noise, self._logits_noise)

    def record(self, recorder: Recorder) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_lane_that_gives_the_same_bits_in_every_batch_passes() -> None:
    assert is_batch_invariant(FakeLane({}, {}))


@pytest.mark.parametrize("size", [1, 2, 16])
def test_one_size_with_other_bits_is_found(size: int) -> None:
    assert not is_batch_invariant(FakeLane({size: 1e-5}, {}))
    assert not is_batch_invariant(FakeLane({}, {size: 1e-5}))


def test_the_real_lane_passes_on_this_machine(tiny_bundle: Bundle) -> None:
    for num_threads in (1, 2):
        lane = CpuLane(tiny_bundle.config, tiny_bundle.path, 64, 8, num_threads)
        assert is_batch_invariant(lane)
