"""Every part of a layer's attention is an item exactly once, and results find their places."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.attention_items import (
    MAX_SHARED_SPANS,
    SHARED_UNITS_PER_THREAD,
    Work,
    bounds_of,
    num_shared_spans,
    num_units_of,
    span_item,
    unit_of,
)
from engine.kernels.attention_tiles import MAX_TILE_ROWS, AttentionTiles
from engine.vector_sizes import SPAN_KEYS

KV_HEADS, GROUP = 2, 3
FEW = 1 << 20, 1 << 20
"""Room for whatever there is."""

pytestmark = pytest.mark.usefixtures("kernels")
Sequences = list[tuple[int, int]]


def make_work(sequences: Sequences, window: int = 0) -> Work:
    """(tokens before this step, tokens of it) of each sequence."""
    starts = np.array([0, *accumulate(new for _, new in sequences)], np.int32)
    contexts = np.array([past + new for past, new in sequences], np.int32)
    nothing: Any = np.zeros((1, 1, 1), np.float32)
    queries = np.zeros((KV_HEADS, GROUP, 4), np.uint8)
    tiles = AttentionTiles(11, GROUP, 22)
    return Work(
        tiles, True, 4, GROUP, window, np.float32(0), queries, starts, contexts,
        np.zeros((1, 1), np.int32), nothing, nothing, nothing, nothing, nothing,
    )  # fmt: skip


def tiles_of(sequences: Sequences) -> set[tuple[int, int, int]]:
    """(sequence, head, first row)."""
    return {
        (s, head, start)
        for s, (_, new) in enumerate(sequences)
        for head in range(KV_HEADS)
        for start in range(0, new * GROUP, MAX_TILE_ROWS)
    }


sequences_of = st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 12)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(sequences_of, st.sampled_from([0, 40, 700]))
def test_units_are_all_tiles_in_all_heads(sequences: Sequences, window: int) -> None:
    work = make_work(sequences, window)
    units = [unit_of(work, number) for number in range(num_units_of(work))]
    found = [(unit.tile.s, unit.head, unit.tile.start) for unit in units]
    assert len(found) == len(set(found)) and set(found) == tiles_of(sequences)
    for unit in units:
        tile, (past, new) = unit.tile, sequences[unit.tile.s]
        assert tile.num_rows == min(MAX_TILE_ROWS, new * GROUP - tile.start)
        assert tile.end == past + 1 + (tile.start + tile.num_rows - 1) // GROUP
        first_seen = past + 1 + tile.start // GROUP - window
        assert tile.begin == (max(first_seen, 0) if window else 0)
        assert tile.code == (11 if tile.num_rows <= GROUP else 22)


@settings(max_examples=60, deadline=None)
@given(sequences_of, st.sampled_from([0, 40, 700]))
def test_spans_are_all_keys_of_all_units_and_have_places(sequences: Sequences, window: int) -> None:
    work = make_work(sequences, window)
    num_spans = num_shared_spans(work, 64, *FEW)
    places: dict[int, list[int]] = {}
    for number in range(num_spans):
        item = span_item(work, number)
        assert item.place + KV_HEADS * item.span == number
        unit = places.setdefault(item.unit, [])
        assert len(unit) == item.span
        begin, end = bounds_of(item.tile, item.span)
        assert begin < end <= item.tile.end and end - begin <= SPAN_KEYS
        assert item.span == 0 or begin == unit[-1]
        unit.append(end)
        if item.span + 1 == item.tile.num_spans:
            assert end == item.tile.end
    assert num_spans == 0 or len(places) == num_units_of(work)


def test_spans_are_shared_only_where_there_is_room_and_use() -> None:
    long = make_work([(3 * SPAN_KEYS, 1)])
    assert num_shared_spans(long, 2, *FEW) == 4 * KV_HEADS
    assert num_shared_spans(long, 1, *FEW) == 0
    assert num_shared_spans(long, 2, KV_HEADS, 4 * KV_HEADS) == 4 * KV_HEADS
    assert num_shared_spans(long, 2, KV_HEADS - 1, MAX_SHARED_SPANS) == 0
    assert num_shared_spans(long, 2, KV_HEADS, 4 * KV_HEADS - 1) == 0
    assert num_shared_spans(make_work([(20, 1)]), 2, *FEW) == 0
    many = [(SPAN_KEYS, 1)] * (2 * SHARED_UNITS_PER_THREAD // KV_HEADS)
    assert num_shared_spans(make_work(many), 2, *FEW) == 2 * KV_HEADS * len(many)
    assert num_shared_spans(make_work([*many, (0, 1)]), 2, *FEW) == 0
