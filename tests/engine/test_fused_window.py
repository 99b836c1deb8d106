"""Pieces as windows, rows and masks, against what every row should see, said in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Batch
from engine.buckets import BucketPlan, Piece
from engine.npu.fused_window import MASKED, PieceLayout
from tests.batches import Span, make_batch

lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=5)


def batch_of(sequences: Sequence[tuple[int, int]]) -> Batch:
    """Each of (new tokens, earlier tokens)."""
    spans = []
    for number, (new, past) in enumerate(sequences):
        table = [number * 4 + i for i in range(-(-(new + past) // 16))]
        spans.append(Span([0] * new, table, past))
    return make_batch(spans)


def seen_by(mask: np.ndarray) -> list[set[int]]:
    assert set(np.unique(mask)) <= {0, float(MASKED)}
    return [set(np.flatnonzero(row == 0).tolist()) for row in mask]


def test_rows_see_their_own_past_and_themselves() -> None:
    batch = batch_of([(2, 3), (1, 2)])
    layout = PieceLayout.of(batch, Piece(0, 3, 4))
    mask = np.empty((4, 8 + 4), np.float32)
    layout.write_mask(0, mask)
    assert layout.num_columns == 5
    assert seen_by(mask) == [{0, 1, 2, 8}, {0, 1, 2, 8, 9}, {3, 4, 10}, set(range(12))]


def test_a_window_hides_what_is_too_old() -> None:
    batch = batch_of([(3, 3)])
    layout = PieceLayout.of(batch, Piece(0, 3, 3))
    mask = np.empty((3, 4 + 3), np.float32)
    layout.write_mask(3, mask)
    assert seen_by(mask) == [{1, 2, 4}, {2, 4, 5}, {4, 5, 6}]


@given(lengths, st.sampled_from([(1,), (4,), (1, 8), (8, 32)]), st.integers(0, 7))
def test_every_row_of_every_piece_sees_exactly_its_sequence_up_to_itself(
    sequences: list[tuple[int, int]], buckets: tuple[int, ...], window: int
) -> None:
    batch = batch_of(sequences)
    owner = np.repeat(np.arange(len(sequences)), [new for new, _ in sequences])
    for piece in BucketPlan({bucket: 32.0 + bucket for bucket in buckets}).pieces(len(owner)):
        layout = PieceLayout.of(batch, piece)
        columns = [
            (int(owner[piece.start + row]), p)
            for row, p in [
                (int(np.argmax(layout.row_sequence == s)), p)
                for s, count in enumerate(layout.num_past)
                for p in range(count)
            ]
        ]
        width = len(columns) + 3
        mask = np.empty((piece.bucket, width + piece.bucket), np.float32)
        layout.write_mask(window, mask)
        rows = range(piece.start, piece.start + piece.num_rows)
        columns += [(-1, -1)] * 3
        columns += [(int(owner[row]), int(batch.positions[row])) for row in rows]
        for number, row in enumerate(rows):
            own, position = int(owner[row]), int(batch.positions[row])
            oldest = max(0, position - window + 1) if window else 0
            seen = seen_by(mask)[number]
            expected = {(own, p) for p in range(oldest, position + 1)}
            assert {columns[column] for column in seen} == expected
            assert len(seen) == len(expected)
        assert (mask[piece.num_rows :] == 0).all()


@given(lengths)
def test_a_pieces_slots_and_positions_are_the_batchs(sequences: list[tuple[int, int]]) -> None:
    batch = batch_of(sequences)
    slots, positions = [], []
    for piece in BucketPlan({3: 1.0}).pieces(batch.num_tokens):
        layout = PieceLayout.of(batch, piece)
        slots += layout.slots.tolist()
        positions += layout.positions.tolist()
    assert slots == batch.slot_mapping.tolist() and positions == batch.positions.tolist()


@pytest.mark.parametrize(
    ("sequence_is_lost", "row_is_lost", "expected"),
    [
        ([0, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
        ([0, 1], [0, 0, 0, 0], [0, 0, 1, 1]),
        ([0, 0], [1, 0, 0, 0], [1, 1, 0, 0]),
        ([0, 0], [0, 1, 0, 1], [0, 1, 0, 1]),
    ],
)
def test_what_comes_after_a_lost_row_is_lost(
    sequence_is_lost: list[int], row_is_lost: list[int], expected: list[int]
) -> None:
    layout = PieceLayout.of(batch_of([(2, 0), (2, 5)]), Piece(0, 4, 4))
    lost = layout.lost_rows(np.array(sequence_is_lost, bool), np.array(row_is_lost, bool))
    assert lost.astype(int).tolist() == expected
