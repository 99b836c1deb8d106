"""Token buckets: the pieces of a step cover its rows, and no choice of buckets is cheaper."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.buckets import BucketPlan, Piece, default_costs

Costs = dict[int, float]

costs_of_buckets = st.dictionaries(
    st.integers(1, 12), st.integers(1, 40).map(float), min_size=1, max_size=4
)


def choices(costs: Costs, num_rows: int) -> Iterator[tuple[int, ...]]:
    """Every multiset of buckets with room for the rows and none to spare."""
    for count in range(num_rows + 1):
        for chosen in combinations_with_replacement(costs, count):
            if sum(chosen) >= num_rows:
                yield chosen


def total(costs: Costs, buckets: tuple[int, ...]) -> float:
    return sum(costs[bucket] for bucket in buckets)


@given(costs_of_buckets, st.integers(0, 9))
def test_no_choice_of_buckets_is_cheaper(costs: Costs, num_rows: int) -> None:
    plan = BucketPlan(costs)
    buckets = tuple(piece.bucket for piece in plan.pieces(num_rows))
    cheapest = min(total(costs, chosen) for chosen in choices(costs, num_rows))
    assert total(costs, buckets) == plan.cost(num_rows) == cheapest


@given(costs_of_buckets, st.integers(0, 9))
def test_of_equally_cheap_choices_the_one_with_the_least_room_wins(
    costs: Costs, num_rows: int
) -> None:
    plan = BucketPlan(costs)
    equals = [c for c in choices(costs, num_rows) if total(costs, c) == plan.cost(num_rows)]
    assert plan.room_for(num_rows) == min(sum(chosen) for chosen in equals)


@given(costs_of_buckets, st.integers(0, 200))
def test_pieces_follow_each_other_and_only_the_last_has_padding(
    costs: Costs, num_rows: int
) -> None:
    plan = BucketPlan(costs)
    pieces = plan.pieces(num_rows)
    start = 0
    for piece in pieces:
        assert piece.start == start
        assert 1 <= piece.num_rows <= piece.bucket
        start += piece.num_rows
    assert start == num_rows
    assert all(piece.num_padding_rows == 0 for piece in pieces[:-1])
    assert [p.bucket for p in pieces] == sorted((p.bucket for p in pieces), reverse=True)
    assert plan.room_for(num_rows) == sum(piece.bucket for piece in pieces)


@given(costs_of_buckets, st.integers(0, 60))
def test_more_rows_never_cost_less(costs: Costs, num_rows: int) -> None:
    plan = BucketPlan(costs)
    assert plan.cost(num_rows) <= plan.cost(num_rows + 1)


@given(costs_of_buckets, st.integers(1, 60))
def test_the_largest_pieces_are_those_of_any_step(costs: Costs, max_rows: int) -> None:
    plan = BucketPlan(costs)
    seen: dict[int, int] = {}
    for num_rows in range(max_rows + 1):
        for piece in plan.pieces(num_rows):
            seen[piece.start] = max(seen.get(piece.start, 0), piece.bucket)
            assert piece.start + piece.bucket <= plan.room(max_rows)
    assert {p.start: p.bucket for p in plan.largest_pieces(max_rows)} == seen


def test_without_measurements_a_call_costs_as_much_as_some_rows() -> None:
    plan = BucketPlan(default_costs([128, 1, 8, 32]))
    assert plan.buckets == (1, 8, 32, 128)
    chosen = {n: [p.bucket for p in plan.pieces(n)] for n in (1, 2, 9, 33, 65, 129, 200)}
    assert chosen == {
        1: [1],
        2: [8],
        9: [32],
        33: [32, 1],
        65: [128],
        129: [128, 1],
        200: [128, 128],
    }


def test_measured_costs_decide() -> None:
    flat = BucketPlan({1: 5.0, 8: 5.1, 32: 5.2})
    assert flat.pieces(9) == (Piece(0, 9, 32),)
    steep = BucketPlan({1: 1.0, 8: 8.0, 32: 40.0})
    assert [p.bucket for p in steep.pieces(10)] == [8, 1, 1]


@pytest.mark.parametrize("costs", [{}, {0: 1.0}, {-1: 1.0}, {1: 0.0}, {1: float("nan")}])
def test_wrong_tables_are_refused(costs: Costs) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        BucketPlan(costs)
