"""The NPU's lane over graphs on the CPU provider: pieces, padding, bindings, the account, faults.

What the graphs compute is the CPU lane's, bit for bit, so every row must equal the CPU lane's row.
That the QNN provider computes the same is for `test_emulated_lane.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.batch import Float32Array
from engine.bundle import Bundle
from engine.errors import DeviceError, DeviceOverflow
from engine.export.model import HEAD_FILE, segment_file
from engine.lane import CpuLane, Lane, head
from engine.npu.lane import LaneGraphs, NpuLane
from engine.session import CpuSessions, Session
from tests.batches import int32

MAX_TOKENS, MAX_ROWS = 40, 12
BUCKETS, HEAD_BUCKETS = (1, 8, 32), (1, 4)


class CheckedSession(Session):
    """A session that insists on its bucket, as a graph of fixed size does."""

    bucket: int

    @classmethod
    def of(cls, session: Session, bucket: int) -> CheckedSession:
        checked = cls(session._name, session._owner)
        checked.bucket = bucket
        return checked

    def binding(self) -> CheckedSession:
        return CheckedSession.of(super().binding(), self.bucket)

    def bind_input(self, name: str, array: NDArray[np.generic]) -> None:
        assert array.shape[:2] == (1, self.bucket) and array.flags.c_contiguous
        super().bind_input(name, array)

    def bind_output(self, name: str, array: NDArray[np.generic]) -> None:
        assert array.shape[:2] == (1, self.bucket) and array.flags.c_contiguous
        super().bind_output(name, array)


@pytest.fixture(scope="module")
def graphs(tiny_bundle: Bundle) -> LaneGraphs:
    sessions = CpuSessions(1)
    num_segments = tiny_bundle.config.num_layers + 1
    segments = [sessions.open(tiny_bundle.path / segment_file(i)) for i in range(num_segments)]
    head_session = sessions.open(tiny_bundle.path / HEAD_FILE)
    return LaneGraphs(
        {b: [CheckedSession.of(segment, b) for segment in segments] for b in BUCKETS},
        {b: CheckedSession.of(head_session, b) for b in HEAD_BUCKETS},
    )


@pytest.fixture
def lane(tiny_bundle: Bundle, graphs: LaneGraphs) -> NpuLane:
    return NpuLane(tiny_bundle.config, graphs, "npu", MAX_TOKENS, MAX_ROWS)


@pytest.fixture(scope="module")
def cpu_lane(tiny_bundle: Bundle) -> CpuLane:
    return CpuLane(tiny_bundle.config, tiny_bundle.path, MAX_TOKENS, MAX_ROWS, 1)


def embeddings(seed: int, num_tokens: int, size: int) -> Float32Array:
    rows = np.random.default_rng(seed).standard_normal((MAX_TOKENS, size), np.float32)
    return rows[:num_tokens]


def run_segments(lane: Lane, seed: int, num_tokens: int) -> None:
    """A step whose attention is made up: the queries of the same token."""
    buffers = lane.begin(num_tokens)
    buffers.hidden[:] = embeddings(seed, num_tokens, buffers.hidden.shape[1])
    for index in range(2):
        lane.run(index)
        buffers.attention[:] = buffers.qkv[:, : buffers.attention.shape[1]]


def run_all(lane: Lane, seed: int, num_tokens: int, rows: Sequence[int]) -> Float32Array:
    run_segments(lane, seed, num_tokens)
    return head(lane, int32(rows)).copy()


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 32, 33, 40])
def test_every_row_is_that_of_the_cpu_lane(
    lane: NpuLane, cpu_lane: CpuLane, num_tokens: int
) -> None:
    rows = sorted({0, num_tokens // 2, num_tokens - 1})
    assert np.array_equal(
        run_all(lane, 0, num_tokens, rows), run_all(cpu_lane, 0, num_tokens, rows)
    )


@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 9, 12])
def test_rows_go_through_the_head_in_buckets_of_their_own(
    lane: NpuLane, cpu_lane: CpuLane, num_rows: int
) -> None:
    rows = [(7 * row) % 20 for row in range(num_rows)]
    assert np.array_equal(run_all(lane, 0, 20, rows), run_all(cpu_lane, 0, 20, rows))


def test_buffers_have_the_steps_size(lane: NpuLane, tiny_bundle: Bundle) -> None:
    config = tiny_bundle.config
    for num_tokens in (1, 40, 7):
        buffers = lane.begin(num_tokens)
        assert buffers.hidden.shape == (num_tokens, config.hidden_size)
        assert buffers.qkv.shape == (num_tokens, config.qkv_size)
        assert buffers.attention.shape == (num_tokens, config.num_heads * config.head_size)
        assert lane.residual(1).shape == (num_tokens, config.hidden_size)
        rows = lane.begin_rows(3)
        assert rows.hidden.shape == rows.final.shape == (3, config.hidden_size)


def test_padding_is_zeros_whatever_the_step_before_left(lane: NpuLane) -> None:
    run_segments(lane, 1, 40)
    lane.begin(9)
    step = lane._step
    for array in (step._hidden[0], step._attention):
        assert array[0, :9].any()
        assert not array[0, 9:32].any()


def test_a_step_leaves_nothing_behind_for_the_next(lane: NpuLane) -> None:
    first = run_all(lane, 0, 9, [8])
    run_all(lane, 1, 40, list(range(12)))
    assert np.array_equal(run_all(lane, 0, 9, [8]), first)


def test_a_twin_has_a_step_of_its_own(lane: NpuLane, cpu_lane: CpuLane) -> None:
    twin = lane.twin()
    here, there = lane.begin(9), twin.begin(20)
    size = here.hidden.shape[1]
    here.hidden[:], there.hidden[:] = embeddings(0, 9, size), embeddings(1, 20, size)
    for index in range(2):
        for each, buffers in ((lane, here), (twin, there)):
            each.run(index)
            buffers.attention[:] = buffers.qkv[:, : buffers.attention.shape[1]]
    expected = [run_all(cpu_lane, 0, 9, [4, 8]), run_all(cpu_lane, 1, 20, [19])]
    rows = lane.begin_rows(2)
    lane.gather(int32([4, 8]), rows)
    lane.run_last()
    assert np.array_equal(lane.run_head(), expected[0])
    rows = lane.begin_rows(1)
    twin.gather(int32([19]), rows)
    lane.run_last()
    assert np.array_equal(lane.run_head(), expected[1])


def test_another_lane_can_take_over_within_a_step(lane: NpuLane, cpu_lane: CpuLane) -> None:
    expected = run_all(cpu_lane, 0, 9, [0, 8])
    buffers, other = lane.begin(9), cpu_lane.begin(9)
    buffers.hidden[:] = embeddings(0, 9, buffers.hidden.shape[1])
    lane.run(0)
    other.attention[:] = buffers.qkv[:, : buffers.attention.shape[1]]
    cpu_lane.residual(1)[:] = lane.residual(1)
    cpu_lane.run(1)
    other.attention[:] = other.qkv[:, : other.attention.shape[1]]
    assert np.array_equal(head(cpu_lane, int32([0, 8])), expected)


def test_bindings_are_made_once(lane: NpuLane) -> None:
    run_all(lane, 0, 40, [0])
    bound = [dict(graph._bound) for graph in lane._step._graphs]
    run_all(lane, 1, 40, [0])
    assert [graph._bound for graph in lane._step._graphs] == bound
    assert list(bound[0]) == [(0, 32), (32, 8)]


def test_the_account_of_calls_rows_and_bytes(lane: NpuLane, tiny_bundle: Bundle) -> None:
    config = tiny_bundle.config
    run_all(lane, 0, 33, [0, 1])  # segments as 32 + 1 rows, the last in 8, the head in 4
    counters = lane.counters
    assert counters.num_calls == 2 * 2 + 1 + 1
    assert counters.num_rows == 2 * 33 + 2 + 2
    assert counters.num_padding_rows == 6 + 2
    hidden, attention = config.hidden_size, config.num_heads * config.head_size
    floats = 33 * (hidden + config.qkv_size) + 33 * (2 * hidden + attention + config.qkv_size)
    floats += 8 * (2 * hidden + attention) + 4 * (hidden + config.vocab_size)
    assert counters.copied_bytes == 4 * floats
    assert counters.gathered_bytes == 4 * 2 * (hidden + attention)
    assert counters.shared_bytes == 0


def test_a_twins_calls_are_in_the_lanes_account(lane: NpuLane) -> None:
    run_segments(lane.twin(), 0, 8)
    assert lane.counters.num_calls == 2


class SharedMemory:
    """As the provider's: a place is registered with the size of the first call that uses it."""

    is_shared = True

    def __init__(self) -> None:
        self.registered: dict[tuple[str, int], int] = {}
        self.arrays: list[Float32Array] = []

    def allocate(self, num_rows: int, size: int) -> Float32Array:
        self.arrays.append(np.zeros((1, num_rows, size), np.float32))
        return self.arrays[-1]

    def binding(self, session: Session) -> Session:
        return SharedSession(session._name, session._owner, self)

    def use(self, context: str, array: NDArray[np.generic]) -> None:
        largest = self.registered.setdefault((context, array.ctypes.data), array.nbytes)
        if array.nbytes > largest:
            raise DeviceError("actual tensor data size is larger than registered")


class SharedSession(Session):
    def __init__(self, name: str, owner: object, memory: SharedMemory) -> None:
        super().__init__(name, owner)
        self._memory = memory
        self._arrays: list[NDArray[np.generic]] = []

    def bind_input(self, name: str, array: NDArray[np.generic]) -> None:
        self._arrays.append(array)
        super().bind_input(name, array)

    def bind_output(self, name: str, array: NDArray[np.generic]) -> None:
        self._arrays.append(array)
        super().bind_output(name, array)

    def run(self) -> None:
        for array in self._arrays:
            self._memory.use(self._name, array)
        super().run()


def test_shared_memory_is_used_without_a_copy_and_its_places_grow_never(
    tiny_bundle: Bundle, graphs: LaneGraphs, cpu_lane: CpuLane
) -> None:
    memory = SharedMemory()
    lane = NpuLane(tiny_bundle.config, graphs, "npu", MAX_TOKENS, MAX_ROWS, memory)
    assert memory.registered and lane.counters.num_calls == 0
    for num_tokens in (1, 8, 2, 40, 33, 32, 5):
        found = run_all(lane, 0, num_tokens, [0])
        assert np.array_equal(found, run_all(cpu_lane, 0, num_tokens, [0]))
    assert lane.counters.shared_bytes > 0
    assert lane.counters.copied_bytes == 0


def test_rows_that_fp16_does_not_hold_are_refused_before_a_segment(lane: NpuLane) -> None:
    buffers = lane.begin(9)
    buffers.hidden[:] = embeddings(0, 9, buffers.hidden.shape[1])
    lane.run(0)
    buffers.attention[:] = 0
    buffers.attention[5, 2] = -65505
    with pytest.raises(DeviceOverflow, match="row 5 that goes into segment 1 .* 65,504"):
        lane.run(1)


@pytest.mark.parametrize("attention", [0, 60_000])
def test_rows_that_fp16_does_not_hold_are_found_after_a_segment(
    lane: NpuLane, attention: float
) -> None:
    buffers = lane.begin(9)
    buffers.hidden[:] = 0
    buffers.hidden[6] = 65_000
    lane.run(0)
    buffers.attention[:] = 0
    buffers.attention[6] = attention
    if attention == 0:
        lane.run(1)
        return
    with pytest.raises(DeviceOverflow, match="row 6 that comes out of segment 1"):
        lane.run(1)


def test_an_overflow_in_the_last_segment_is_found(lane: NpuLane) -> None:
    run_segments(lane, 0, 3)
    rows = lane.begin_rows(2)
    lane.gather(int32([0, 1]), rows)
    rows.hidden[1] = 65_000
    rows.attention[1] = 60_000
    with pytest.raises(DeviceOverflow, match="row 1 that comes out of segment 2"):
        lane.run_last()


def test_an_overflow_in_the_head_is_found(lane: NpuLane) -> None:
    run_segments(lane, 0, 3)
    rows = lane.begin_rows(2)
    lane.gather(int32([0, 1]), rows)
    lane.run_last()
    graph = lane._rows._head._head
    lane._rows._head._logits[:] = 0

    class Overflows:
        def run(self, pieces: object) -> None:
            graph.run(pieces)  # type: ignore[arg-type]
            lane._rows._head._logits[0, 1, 7] = np.inf

    lane._rows._head._head = Overflows()  # type: ignore[assignment]
    with pytest.raises(DeviceOverflow, match="row 1 that comes out of the head"):
        lane.run_head()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_came_in_not_finite_is_no_fault_and_harms_no_other(
    lane: NpuLane, bad: float
) -> None:
    clean = run_all(lane, 0, 20, list(range(12)))
    buffers = lane.begin(20)
    buffers.hidden[:] = embeddings(0, 20, buffers.hidden.shape[1])
    buffers.hidden[4, 3] = bad
    for index in range(2):
        lane.run(index)
        buffers.attention[:] = buffers.qkv[:, : buffers.attention.shape[1]]
    logits = head(lane, int32(range(12)))
    assert np.isnan(logits[4]).all()
    others = [row for row in range(12) if row != 4]
    assert np.array_equal(logits[others], clean[others])


def test_a_failing_call_is_the_callers_to_handle(lane: NpuLane) -> None:
    class Broken:
        def binding(self) -> Broken:
            return self

        def bind_input(self, name: str, array: object) -> None: ...

        def bind_output(self, name: str, array: object) -> None: ...

        def run(self) -> None:
            raise DeviceError("gone")

    lane.begin(1)
    lane._step._graphs[1]._sessions = {1: Broken()}  # type: ignore[dict-item]
    lane.run(0)
    with pytest.raises(DeviceError, match="gone"):
        lane.run(1)


def test_measured_costs_choose_the_buckets(
    tiny_bundle: Bundle, graphs: LaneGraphs, cpu_lane: CpuLane
) -> None:
    """A device on which the middle bucket costs hardly more than the least."""
    costs = {1: 1.0, 8: 1.1, 32: 9.0}
    measured = NpuLane(tiny_bundle.config, graphs, "npu", MAX_TOKENS, MAX_ROWS, costs=costs)
    assert np.array_equal(run_all(measured, 0, 17, [16]), run_all(cpu_lane, 0, 17, [16]))
    assert list(measured._step._graphs[0]._bound) == [(0, 8), (8, 8), (16, 1)]


def test_a_closed_lane_keeps_no_session(lane: NpuLane) -> None:
    run_all(lane, 0, 9, [0])
    lane.close()
    assert lane._step._graphs == [] and not lane._graphs.segments
