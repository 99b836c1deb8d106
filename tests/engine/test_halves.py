"""Cutting a batch in two: both halves together are the batch, and it is cut where it pays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.halves import Cut, cut_batch, find_cut, overlapped_seconds
from tests.batches import Span, make_batch

LAYERS = 8


@st.composite
def batches_with_cuts(draw: st.DrawFn) -> tuple[list[Span], int]:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    spans = [Span(list(range(n)), [i, 6 + i, 12 + i, 18 + i], 3) for i, n in enumerate(lengths)]
    total = sum(lengths)
    return spans, draw(st.integers(1, total - 1)) if total > 1 else 0


@given(batches_with_cuts(), st.sampled_from(["all", "last"]))
def test_the_halves_are_the_batch(given_cut: tuple[list[Span], int], rows: str) -> None:
    spans, token = given_cut
    batch = make_batch(spans, rows=rows)
    if token == 0:
        return
    halves = cut_batch(batch, token)
    assert [half.num_tokens for half in halves] == [token, batch.num_tokens - token]
    for name in ("token_ids", "positions", "slot_mapping"):
        joined = np.concatenate([getattr(half, name) for half in halves])
        assert np.array_equal(joined, getattr(batch, name))
    offsets = np.concatenate([halves[0].logits_rows, halves[1].logits_rows + token])
    assert np.array_equal(offsets, batch.logits_rows)
    for half, first_token in zip(halves, (0, token), strict=True):
        assert half.query_starts[0] == 0 and half.query_starts[-1] == half.num_tokens
        assert len(half.query_starts) == half.num_sequences + 1 == len(half.block_tables) + 1
        assert half.query_starts.dtype == half.context_lens.dtype == np.int32
        for s in range(half.num_sequences):
            last = int(half.query_starts[s + 1]) - 1
            assert half.context_lens[s] == half.positions[last] + 1
            owner = np.searchsorted(batch.query_starts, first_token + last, side="right") - 1
            assert np.array_equal(half.block_tables[s], batch.block_tables[owner])


def decodes(num: int) -> list[Span]:
    return [Span([1], [i], 5) for i in range(num)]


def cut_of(spans: list[Span], attention: float, device_s: float, handover_s: float) -> Cut | None:
    batch = make_batch(spans, rows="last")
    per_token = device_s / batch.num_tokens
    attention_s = np.full(batch.num_sequences, attention / batch.num_sequences)
    return find_cut(batch, attention_s, lambda n: n * per_token, handover_s, LAYERS)


def test_equal_sides_are_cut_in_the_middle() -> None:
    cut = cut_of(decodes(8), 1.0, 1.0, 0.0)
    assert cut is not None and cut.token == 4
    assert cut.serial_s == pytest.approx(2 * LAYERS)
    assert cut.overlapped_s == pytest.approx(LAYERS + 0.5)


def test_a_step_stays_whole_where_cutting_costs_more_than_it_brings() -> None:
    assert cut_of(decodes(1), 1.0, 1.0, 0.0) is None, "one token cannot be cut"
    assert cut_of(decodes(8), 1.0, 1.0, 0.6) is None, "threads that wait for each other"
    assert cut_of(decodes(8), 0.001, 1.0, 0.0) is None, "there is nothing to run beside it"


def test_a_device_that_takes_as_long_for_half_the_tokens_is_not_called_twice() -> None:
    batch = make_batch(decodes(8), rows="last")
    assert find_cut(batch, np.full(8, 0.1), lambda n: 1.0, 0.0, LAYERS) is None


def test_sequences_are_not_cut_unless_one_is_long() -> None:
    spans = [Span(list(range(10)), [0], 0), Span(list(range(10)), [1], 0), *decodes(2)]
    cut = cut_of(spans, 1.0, 1.0, 0.0)
    assert cut is not None and cut.token in (10, 20, 21)
    cut = cut_of([Span(list(range(128)), list(range(8)))], 1.0, 1.0, 0.0)
    assert cut is not None and cut.token == 64


def test_the_estimate_is_no_better_than_either_side_alone() -> None:
    for device, attention in (((1.0, 2.0), (3.0, 1.0)), ((0.1, 0.1), (2.0, 2.0))):
        seconds = overlapped_seconds(device, attention, 0.0, LAYERS)
        assert seconds >= LAYERS * max(sum(device), sum(attention))
        assert seconds <= LAYERS * (sum(device) + sum(attention)) + max(*device, *attention)
