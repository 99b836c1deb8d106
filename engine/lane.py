"""A lane: one device's way through the segments, with the buffers that they read and write.

The runner fills in the embeddings, calls the segments in order and computes attention between
them. KV pages live elsewhere, so another lane can take over at any step, and at any segment of
one: it copies the residual and goes on. Knows no sequences and makes no decisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from engine.architectures.config import ModelConfig
from engine.batch import Float32Array, Int32Array
from engine.export.model import HEAD_FILE, segment_file
from engine.kernels.rows_kernel import copy_rows
from engine.recorder import Recorder
from engine.session import CpuSessions, Session


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Views of a lane's own memory for a step of T tokens.

    `hidden` [T, hidden] is to be filled with embeddings. `qkv` [T, (H + 2 * KV) * D] is written by
    each segment but the last, and `attention` [T, H * D] read by each but the first.
    """

    hidden: Float32Array
    qkv: Float32Array
    attention: Float32Array


@dataclass(frozen=True, slots=True)
class RowBuffers:
    """Views of a lane's own memory for the R rows whose logits are wanted.

    `hidden` [R, hidden] and `attention` [R, H * D] are read by segment L, which writes `final`
    [R, hidden], which the head reads.
    """

    hidden: Float32Array
    attention: Float32Array
    final: Float32Array


@dataclass(frozen=True, slots=True)
class LaneCounters:
    """What a lane has done since it was opened: the account of calls and of moved bytes.

    `num_padding_rows` were computed for nothing, to fill buckets. `copied_bytes` went between host
    and device buffers, `gathered_bytes` between buffers of the host, `shared_bytes` lay in memory
    that both see and went nowhere.
    """

    num_calls: int = 0
    num_rows: int = 0
    num_padding_rows: int = 0
    copied_bytes: int = 0
    gathered_bytes: int = 0
    shared_bytes: int = 0


class Lane(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def counters(self) -> LaneCounters: ...

    def begin(self, num_tokens: int) -> StepBuffers:
        """Prepares a step of T tokens."""
        ...

    def run(self, index: int) -> None:
        """Segment `index`, 0 to L - 1, over all T tokens. Raises DeviceError."""
        ...

    def residual(self, index: int) -> Float32Array:
        """[T, hidden]: where segment `index`, 1 to L - 1, of this step finds its hidden state."""
        ...

    def gather(self, rows: Int32Array, into: RowBuffers) -> None:
        """Copies `rows` [R] of this step to where segment L reads them, of this or another lane.

        `into.hidden` and `into.attention` [R, …] are set; the step's last segment has run.
        """
        ...

    def begin_rows(self, num_rows: int) -> RowBuffers:
        """Prepares segment L and the head for R rows."""
        ...

    def run_last(self) -> None:
        """Segment L over the rows. Raises DeviceError."""
        ...

    def run_head(self) -> Float32Array:
        """The head over the rows: logits [R, V], valid until the next call. Raises DeviceError."""
        ...

    def twin(self) -> Lane:
        """The same loaded segments with bindings of their own: a second step beside this one's.

        Their runs take turns, they never overlap. Together the two steps have at most
        `max_tokens` tokens, since they share their buffers. Only the lane itself does rows.
        """
        ...

    def record(self, recorder: Recorder) -> None:
        """From now on tells the recorder of its calls, those of its twins included."""
        ...

    def close(self) -> None:
        """Gives the device's memory back. Neither the lane nor its twins are used afterwards."""
        ...


def head(lane: Lane, rows: Int32Array) -> Float32Array:
    """Segment L and the head over `rows` [R] of a step that this lane ran alone: logits [R, V].

    Valid until the next call. Raises DeviceError.
    """
    buffers = lane.begin_rows(len(rows))
    lane.gather(rows, buffers)
    lane.run_last()
    return lane.run_head()


class CpuLane:
    """ONNX Runtime's CPU provider, any number of tokens up to `max_tokens`."""

    name = "cpu"
    counters = LaneCounters()
    """Nothing is padded and nothing moves: the graphs work on these buffers as they are."""

    def __init__(
        self, config: ModelConfig, folder: Path, max_tokens: int, max_rows: int, num_threads: int
    ) -> None:
        """Raises BundleError when a graph cannot be loaded."""
        sessions = CpuSessions(num_threads)
        self._segments = [
            sessions.open(folder / segment_file(i)) for i in range(config.num_layers + 1)
        ]
        self._head = sessions.open(folder / HEAD_FILE)
        self._rows = _Rows(config, max_rows)
        self._num_rows = 0
        self._step = _Step(self._segments[:-1], _Memory.of(config, max_tokens), is_twin=False)

    def begin(self, num_tokens: int) -> StepBuffers:
        return self._step.begin(num_tokens)

    def run(self, index: int) -> None:
        self._segments[index].run()

    def residual(self, index: int) -> Float32Array:
        return self._step.residual(index)

    def gather(self, rows: Int32Array, into: RowBuffers) -> None:
        self._step.gather(rows, into)

    def begin_rows(self, num_rows: int) -> RowBuffers:
        if num_rows != self._num_rows:
            self._rows.bind(self._segments[-1], self._head, num_rows)
            self._num_rows = num_rows
        return self._rows.views(num_rows)

    def run_last(self) -> None:
        self._segments[-1].run()

    def run_head(self) -> Float32Array:
        self._head.run()
        return self._rows.logits[0, : self._num_rows]

    def twin(self) -> CpuTwin:
        return CpuTwin(self, self._step.twin())

    def record(self, recorder: Recorder) -> None:
        """A segment is one call: who runs it knows how long that took."""

    def close(self) -> None:
        pass


class CpuTwin:
    """Bindings of its own over a `CpuLane`'s sessions, at the far end of the lane's buffers."""

    name = "cpu"
    counters = LaneCounters()

    def __init__(self, lane: CpuLane, step: _Step) -> None:
        self._lane = lane
        self._step = step

    def begin(self, num_tokens: int) -> StepBuffers:
        return self._step.begin(num_tokens)

    def run(self, index: int) -> None:
        self._step.segments[index].run()

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

    def twin(self) -> CpuTwin:
        return self._lane.twin()

    def record(self, recorder: Recorder) -> None:
        self._lane.record(recorder)

    def close(self) -> None:
        pass


def _buffer(num_rows: int, size: int) -> Float32Array:
    return np.zeros((1, num_rows, size), np.float32)


@dataclass(frozen=True, slots=True)
class _Memory:
    """What a step of up to `max_tokens` needs, each [1, max_tokens, …]."""

    hidden: tuple[Float32Array, Float32Array]
    qkv: Float32Array
    attention: Float32Array

    @classmethod
    def of(cls, config: ModelConfig, max_tokens: int) -> _Memory:
        return cls(
            (_buffer(max_tokens, config.hidden_size), _buffer(max_tokens, config.hidden_size)),
            _buffer(max_tokens, config.qkv_size),
            _buffer(max_tokens, config.num_heads * config.head_size),
        )


class _Step:
    """Segments 0 to L - 1 bound to one end of the memory for the step's number of tokens."""

    def __init__(self, segments: list[Session], memory: _Memory, is_twin: bool) -> None:
        self.segments = segments
        self._memory = memory
        self._is_twin = is_twin
        self._tokens = slice(0, 0)
        self._views = StepBuffers(*(np.zeros((0, 0), np.float32) for _ in range(3)))

    def twin(self) -> _Step:
        own = [segment.binding() for segment in self.segments]
        return _Step(own, self._memory, not self._is_twin)

    def begin(self, num_tokens: int) -> StepBuffers:
        if num_tokens != len(self._views.hidden):
            end = self._memory.qkv.shape[1] if self._is_twin else num_tokens
            self._tokens = tokens = slice(end - num_tokens, end)
            self._bind(tokens)
            m = self._memory
            self._views = StepBuffers(
                m.hidden[0][0, tokens], m.qkv[0, tokens], m.attention[0, tokens]
            )
        return self._views

    def residual(self, index: int) -> Float32Array:
        return self._read_by(index)[0, self._tokens]

    def gather(self, rows: Int32Array, into: RowBuffers) -> None:
        copy_rows(self._views.attention, rows, into.attention)
        copy_rows(self.residual(len(self.segments)), rows, into.hidden)

    def _read_by(self, index: int) -> Float32Array:
        """Segment i reads one hidden buffer and writes the other; the first writes none."""
        return self._memory.hidden[(index + 1) % 2 if index else 0]

    def _bind(self, tokens: slice) -> None:
        for i, segment in enumerate(self.segments):
            segment.bind_input("hidden", self._read_by(i)[:, tokens])
            if i:
                segment.bind_input("attention", self._memory.attention[:, tokens])
                segment.bind_output("hidden_out", self._read_by(i + 1)[:, tokens])
            segment.bind_output("qkv", self._memory.qkv[:, tokens])


class _Rows:
    """The buffers of segment L and the head, each [1, max_rows, …]."""

    def __init__(self, config: ModelConfig, max_rows: int) -> None:
        self._hidden = _buffer(max_rows, config.hidden_size)
        self._attention = _buffer(max_rows, config.num_heads * config.head_size)
        self._final = _buffer(max_rows, config.hidden_size)
        self.logits = _buffer(max_rows, config.vocab_size)

    def views(self, num_rows: int) -> RowBuffers:
        arrays = (self._hidden, self._attention, self._final)
        return RowBuffers(*(array[0, :num_rows] for array in arrays))

    def bind(self, last: Session, head: Session, num_rows: int) -> None:
        last.bind_input("attention", self._attention[:, :num_rows])
        last.bind_input("hidden", self._hidden[:, :num_rows])
        last.bind_output("hidden_out", self._final[:, :num_rows])
        head.bind_input("hidden", self._final[:, :num_rows])
        head.bind_output("logits", self.logits[:, :num_rows])
