"""Calls of graphs of fixed size: which arrays they read and write, bound once, and an account.

Knows no provider (sessions and memory are handed in) and no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.batch import Float32Array
from engine.buckets import BucketPlan, Piece
from engine.lane import LaneCounters
from engine.recorder import NO_RECORDER, Recorder
from engine.session import Session


class HostMemory(Protocol):
    """Where the buffers lie that graphs read and write."""

    @property
    def is_shared(self) -> bool:
        """Whether the device reads and writes it without a copy."""
        ...

    def allocate(self, num_rows: int, size: int) -> Float32Array:
        """[1, num_rows, size] zeros, valid as long as the memory itself."""
        ...

    def binding(self, session: Session) -> Session:
        """A binding of `session` for arrays of this memory."""
        ...


class PlainMemory:
    """The process's own memory: the provider copies what it needs."""

    is_shared = False

    def allocate(self, num_rows: int, size: int) -> Float32Array:
        return np.zeros((1, num_rows, size), np.float32)

    def binding(self, session: Session) -> Session:
        return session.binding()


class CallAccount:
    """Counts what calls compute and move. `track` is where a recorder shows them."""

    def __init__(self, is_shared: bool, track: str) -> None:
        self.recorder: Recorder = NO_RECORDER
        self.track = track
        self._is_shared = is_shared
        self._num_calls = self._num_rows = self._num_padding_rows = 0
        self._moved_bytes = self._gathered_bytes = 0

    @property
    def counters(self) -> LaneCounters:
        return LaneCounters(
            num_calls=self._num_calls,
            num_rows=self._num_rows,
            num_padding_rows=self._num_padding_rows,
            copied_bytes=0 if self._is_shared else self._moved_bytes,
            gathered_bytes=self._gathered_bytes,
            shared_bytes=self._moved_bytes if self._is_shared else 0,
        )

    def call(self, session: Session, piece: Piece, num_bytes: int) -> None:
        """`num_bytes`: of all inputs and outputs of the call. Raises DeviceError."""
        start_ns = self.recorder.now_ns()
        session.run()
        self.recorder.called(session.name, self.track, start_ns, piece, num_bytes)
        self._num_calls += 1
        self._num_rows += piece.num_rows
        self._num_padding_rows += piece.num_padding_rows
        self._moved_bytes += num_bytes

    def gathered(self, num_bytes: int) -> None:
        self._gathered_bytes += num_bytes


@dataclass(frozen=True, slots=True)
class Wiring:
    """A graph's inputs and outputs with the buffers they stand for, each [1, rows, size]."""

    inputs: Mapping[str, Float32Array]
    outputs: Mapping[str, Float32Array]

    @property
    def row_bytes(self) -> int:
        """Of all inputs and outputs of one row."""
        arrays = [*self.inputs.values(), *self.outputs.values()]
        return sum(array.shape[2] * array.itemsize for array in arrays)

    def bind(self, binding: Session, piece: Piece) -> Session:
        window = slice(piece.start, piece.start + piece.bucket)
        for name, array in self.inputs.items():
            binding.bind_input(name, array[:, window])
        for name, array in self.outputs.items():
            binding.bind_output(name, array[:, window])
        return binding


class BoundGraph:
    """One graph in all its buckets, over one set of buffers: bound once for each place."""

    def __init__(
        self,
        sessions: Mapping[int, Session],
        wiring: Wiring,
        memory: HostMemory,
        account: CallAccount,
    ) -> None:
        self._sessions = sessions
        self._wiring = wiring
        self._memory = memory
        self._account = account
        self._row_bytes = wiring.row_bytes
        self._bound: dict[tuple[int, int], Session] = {}

    def run(self, pieces: Sequence[Piece]) -> None:
        """Raises DeviceError."""
        for piece in pieces:
            self._account.call(self._binding(piece), piece, piece.bucket * self._row_bytes)

    def register(self, plan: BucketPlan, max_rows: int) -> None:
        """Runs it once at every place where a piece can begin, in the largest size there.

        The provider hands shared memory to the device piece by piece, when a call first uses it,
        and remembers it by its address: a larger bucket at an address that was first used with a
        smaller one is an error (QnnContextMemHandleManager::GetOrRegister in its source).
        """
        if self._memory.is_shared:
            for piece in plan.largest_pieces(max_rows):
                self._binding(piece).run()

    def _binding(self, piece: Piece) -> Session:
        place = piece.start, piece.bucket
        bound = self._bound.get(place)
        if bound is None:
            bound = self._memory.binding(self._sessions[piece.bucket])
            self._bound[place] = self._wiring.bind(bound, piece)
        return bound
