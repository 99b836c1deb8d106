"""A piece of a batch as a graph with the attention inside sees it: a window, rows, and a mask.

    earlier tokens of sequence 0 │ of sequence 1 │ … │ nothing │ the piece's rows │ padding
    column 0                                                   W                            W + T

Pure: numbers and arrays, no pages, no graphs, no devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.batch import Batch, Float32Array, Int32Array
from engine.buckets import Piece

MASKED = np.float32(-30_000)
"""Within fp16, and far below any score: its exponential is zero."""


@dataclass(frozen=True, slots=True)
class PieceLayout:
    """The rows of a piece, with what their sequences have in their pages before it.

    S' sequences have rows in the piece. `tables` [S', B], `num_past` [S']; `row_sequence` [T']
    (an index into these), `positions` [T'], `slots` [T'].
    """

    tables: Int32Array
    num_past: Int32Array
    row_sequence: Int32Array
    positions: Int32Array
    slots: Int32Array

    @classmethod
    def of(cls, batch: Batch, piece: Piece) -> PieceLayout:
        rows = slice(piece.start, piece.start + piece.num_rows)
        starts = batch.query_starts
        sequence = np.searchsorted(starts, np.arange(rows.start, rows.stop), side="right") - 1
        first, last = int(sequence[0]), int(sequence[-1])
        first_rows = np.maximum(starts[first : last + 1], piece.start)
        return cls(
            batch.block_tables[first : last + 1],
            batch.positions[first_rows],
            (sequence - first).astype(np.int32),
            batch.positions[rows],
            batch.slot_mapping[rows],
        )

    @property
    def num_columns(self) -> int:
        """Earlier tokens of all its sequences."""
        return int(self.num_past.sum())

    def write_mask(self, window: int, out: Float32Array) -> None:
        """out [T, W + T]: 0 where a row sees a column, `MASKED` elsewhere.

        A row sees its own sequence's tokens up to itself; with a `window`, so many of them. Padding
        rows see everything, so that their softmax is one of numbers.
        """
        num_rows, num_past = len(self.positions), self.num_columns
        width = out.shape[1] - len(out)
        sequence = np.full(out.shape[1], -1, np.int32)
        position = np.zeros(out.shape[1], np.int32)
        sequence[:num_past] = np.repeat(np.arange(len(self.num_past)), self.num_past)
        position[:num_past] = _counts(self.num_past)
        sequence[width : width + num_rows] = self.row_sequence
        position[width : width + num_rows] = self.positions
        distance = self.positions[:, None] - position
        sees = (self.row_sequence[:, None] == sequence) & (distance >= 0)
        if window:
            sees &= distance < window
        out[:num_rows] = np.where(sees, np.float32(0), MASKED)
        out[num_rows:] = 0

    def lost_rows(self, sequence_is_lost: np.ndarray, row_is_lost: np.ndarray) -> np.ndarray:
        """[T'] bool: rows of a lost sequence, rows that are lost, and what comes after them."""
        lost = sequence_is_lost[self.row_sequence] | row_is_lost
        for row in range(1, len(lost)):
            lost[row] |= lost[row - 1] and self.row_sequence[row] == self.row_sequence[row - 1]
        return np.asarray(lost)


def _counts(lengths: Int32Array) -> Int32Array:
    """0, 1, …, lengths[0] - 1, 0, 1, …, lengths[1] - 1, …"""
    ends = np.cumsum(lengths)
    counts = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    return counts.astype(np.int32)
