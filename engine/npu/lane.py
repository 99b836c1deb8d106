"""The NPU's lane: segments in graphs of fixed size, called over the pieces of a step.

A step's rows lie in buffers that are allocated once; a piece is a window of them, so nothing is
copied to fill a bucket. The padding of the last piece is zeros and is never read. Never falls
back: whatever goes wrong is raised. Knows no provider (its sessions and its memory are handed in),
no sequences and no pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.architectures.config import ModelConfig
from engine.batch import Float32Array, Int32Array
from engine.buckets import BucketPlan, Piece, default_costs
from engine.kernels.rows_kernel import copy_rows
from engine.lane import LaneCounters, RowBuffers, StepBuffers
from engine.npu.calls import BoundGraph, CallAccount, HostMemory, PlainMemory, Wiring
from engine.npu.fp16_range import rows_not_finite, settle
from engine.recorder import Recorder
from engine.session import Session
from engine.span import lane_track


@dataclass(frozen=True, slots=True)
class LaneGraphs:
    """Loaded graphs by their bucket: segments 0 to L, and the head. All [1, bucket, …] float32."""

    segments: Mapping[int, Sequence[Session]]
    heads: Mapping[int, Session]

    def segment(self, index: int) -> dict[int, Session]:
        return {bucket: segments[index] for bucket, segments in self.segments.items()}

    @property
    def sessions(self) -> tuple[Session, ...]:
        return (*(s for segments in self.segments.values() for s in segments), *self.heads.values())


class NpuLane:
    """Segments and head of one model on one device. Not thread-safe: calls take turns.

    `costs` are the measured times of one call, by bucket, for the segments; without them the
    documented default decides how a step is cut.
    """

    def __init__(
        self,
        config: ModelConfig,
        graphs: LaneGraphs,
        name: str,
        max_tokens: int,
        max_rows: int,
        memory: HostMemory | None = None,
        costs: Mapping[int, float] | None = None,
    ) -> None:
        """Raises DeviceError when shared memory cannot be had or used."""
        self.name = name
        self._config = config
        self._graphs = graphs
        self._max_tokens = max_tokens
        self._memory = memory or PlainMemory()
        self._account = CallAccount(self._memory.is_shared, lane_track(name))
        self._plan = BucketPlan(costs or default_costs(list(graphs.segments)))
        self._step = self._new_step()
        self._rows = _Rows(config, graphs, max_rows, self._memory, self._plan, self._account)

    @property
    def counters(self) -> LaneCounters:
        """Those of its twins are in it."""
        return self._account.counters

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Of all graphs, for what is set on sessions."""
        return self._graphs.sessions

    def begin(self, num_tokens: int) -> StepBuffers:
        return self._step.begin(num_tokens)

    def run(self, index: int) -> None:
        self._step.run(index)

    def residual(self, index: int) -> Float32Array:
        return self._step.residual(index)

    def gather(self, rows: Int32Array, into: RowBuffers) -> None:
        self._step.gather(rows, into)

    def begin_rows(self, num_rows: int) -> RowBuffers:
        return self._rows.begin(num_rows)

    def run_last(self) -> None:
        self._rows.run_last()

    def run_head(self) -> Float32Array:
        return self._rows.run_head()

    def twin(self) -> NpuTwin:
        return NpuTwin(self, self._new_step())

    def record(self, recorder: Recorder) -> None:
        self._account.recorder = recorder

    def close(self) -> None:
        """The sessions end with the last reference to their bindings."""
        self._step.close()
        self._rows.close()
        self._graphs = LaneGraphs({}, {})

    def _new_step(self) -> _Step:
        return _Step(
            self._config, self._graphs, self._max_tokens, self._memory, self._plan, self._account
        )


class NpuTwin:
    """A second step over an `NpuLane`'s sessions, with bindings and buffers of its own."""

    def __init__(self, lane: NpuLane, step: _Step) -> None:
        self.name = lane.name
        self._lane = lane
        self._step = step

    @property
    def counters(self) -> LaneCounters:
        """The lane has the account of both."""
        return LaneCounters()

    def begin(self, num_tokens: int) -> StepBuffers:
        return self._step.begin(num_tokens)

    def run(self, index: int) -> None:
        self._step.run(index)

    def residual(self, index: int) -> Float32Array:
        return self._step.residual(index)

    def gather(self, rows: Int32Array, into: RowBuffers) -> None:
        self._step.gather(rows, into)

    def begin_rows(self, num_rows: int) -> RowBuffers:
        return self._lane.begin_rows(num_rows)

    def run_last(self) -> None:
        self._lane.run_last()

    def run_head(self) -> Float32Array:
        return self._lane.run_head()

    def twin(self) -> NpuTwin:
        return self._lane.twin()

    def record(self, recorder: Recorder) -> None:
        self._lane.record(recorder)

    def close(self) -> None:
        self._step.close()


class HeadRows:
    """The head over rows of final hidden states."""

    def __init__(
        self,
        config: ModelConfig,
        heads: Mapping[int, Session],
        max_rows: int,
        memory: HostMemory,
        account: CallAccount,
        room: int = 0,
    ) -> None:
        """`room`: rows that `final` has at least."""
        self._plan = BucketPlan(default_costs(list(heads)))
        num_rows = self._plan.room(max_rows)
        self.final = memory.allocate(max(room, num_rows), config.hidden_size)
        self._logits = memory.allocate(num_rows, config.vocab_size)
        wiring = Wiring({"hidden": self.final}, {"logits": self._logits})
        self._head = BoundGraph(heads, wiring, memory, account)
        self._head.register(self._plan, max_rows)

    def run(self, num_rows: int) -> Float32Array:
        """Logits [R, V] of the first R rows of `final` [1, …, hidden]. Raises DeviceError."""
        final, logits = self.final[0, :num_rows], self._logits[0, :num_rows]
        self.final[0, num_rows : self._plan.room_for(num_rows)] = 0
        lost = rows_not_finite([final], "the head")
        self._head.run(self._plan.pieces(num_rows))
        settle([logits], lost, "the head")
        return logits


class _Step:
    """Segments 0 to L - 1 over buffers for one step."""

    def __init__(
        self,
        config: ModelConfig,
        graphs: LaneGraphs,
        max_tokens: int,
        memory: HostMemory,
        plan: BucketPlan,
        account: CallAccount,
    ) -> None:
        self._plan = plan
        self._account = account
        self._num_layers = config.num_layers
        room = plan.room(max_tokens)
        self._hidden = [memory.allocate(room, config.hidden_size) for _ in range(2)]
        self._qkv = memory.allocate(room, config.qkv_size)
        self._attention = memory.allocate(room, config.num_heads * config.head_size)
        self._graphs = [
            BoundGraph(graphs.segment(i), self._wiring(i), memory, account)
            for i in range(config.num_layers)
        ]
        self._num_tokens = 0
        self._pieces: tuple[Piece, ...] = ()
        for graph in self._graphs:
            graph.register(plan, max_tokens)

    def begin(self, num_tokens: int) -> StepBuffers:
        self._num_tokens = num_tokens
        self._pieces = self._plan.pieces(num_tokens)
        padding = slice(num_tokens, self._plan.room_for(num_tokens))
        self._hidden[0][0, padding] = 0
        self._attention[0, padding] = 0
        return StepBuffers(
            self._hidden[0][0, :num_tokens],
            self._qkv[0, :num_tokens],
            self._attention[0, :num_tokens],
        )

    def run(self, index: int) -> None:
        rows, name = slice(0, self._num_tokens), f"segment {index}"
        inputs = [self._read_by(index)[0, rows]]
        outputs = [self._qkv[0, rows]]
        if index:
            inputs.append(self._attention[0, rows])
            outputs.append(self._read_by(index + 1)[0, rows])
        lost = rows_not_finite(inputs, name)
        self._graphs[index].run(self._pieces)
        settle(outputs, lost, name)

    def residual(self, index: int) -> Float32Array:
        return self._read_by(index)[0, : self._num_tokens]

    def gather(self, rows: Int32Array, into: RowBuffers) -> None:
        copy_rows(self._attention[0], rows, into.attention)
        copy_rows(self._read_by(self._num_layers)[0], rows, into.hidden)
        self._account.gathered(into.attention.nbytes + into.hidden.nbytes)

    def close(self) -> None:
        self._graphs = []

    def _read_by(self, index: int) -> Float32Array:
        """Segment i reads one hidden buffer and writes the other; the first writes none."""
        return self._hidden[(index + 1) % 2 if index else 0]

    def _wiring(self, index: int) -> Wiring:
        hidden = self._read_by(index)
        if index == 0:
            return Wiring({"hidden": hidden}, {"qkv": self._qkv})
        return Wiring(
            {"attention": self._attention, "hidden": hidden},
            {"hidden_out": self._read_by(index + 1), "qkv": self._qkv},
        )


class _Rows:
    """Segment L and the head over the rows whose logits are wanted."""

    def __init__(
        self,
        config: ModelConfig,
        graphs: LaneGraphs,
        max_rows: int,
        memory: HostMemory,
        plan: BucketPlan,
        account: CallAccount,
    ) -> None:
        self._plan = plan
        room = plan.room(max_rows)
        self._hidden = memory.allocate(room, config.hidden_size)
        self._attention = memory.allocate(room, config.num_heads * config.head_size)
        self._head = HeadRows(config, graphs.heads, max_rows, memory, account, room)
        inputs = {"attention": self._attention, "hidden": self._hidden}
        wiring = Wiring(inputs, {"hidden_out": self._head.final})
        self._name = f"segment {config.num_layers}"
        self._last = BoundGraph(graphs.segment(config.num_layers), wiring, memory, account)
        self._last.register(plan, max_rows)
        self._num_rows = 0

    def begin(self, num_rows: int) -> RowBuffers:
        self._num_rows = num_rows
        padding = slice(num_rows, self._plan.room_for(num_rows))
        self._hidden[0, padding] = 0
        self._attention[0, padding] = 0
        buffers = (self._hidden, self._attention, self._head.final)
        return RowBuffers(*(buffer[0, :num_rows] for buffer in buffers))

    def run_last(self) -> None:
        rows = slice(0, self._num_rows)
        lost = rows_not_finite([self._hidden[0, rows], self._attention[0, rows]], self._name)
        self._last.run(self._plan.pieces(self._num_rows))
        settle([self._head.final[0, rows]], lost, self._name)

    def run_head(self) -> Float32Array:
        return self._head.run(self._num_rows)

    def close(self) -> None:
        del self._last, self._head
