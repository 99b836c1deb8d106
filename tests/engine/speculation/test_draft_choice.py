"""Drafts where they pay, for everybody in the step, and nowhere else."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation.draft_choice import (
    MIN_GAIN,
    NEVER,
    DraftGate,
    choose_drafts,
    least_chance,
)
from engine.speculation.step_costs import StepCosts, guess_for


def costs_of(per_row: float) -> StepCosts:
    return StepCosts(lambda sizes: np.asarray(1 + per_row * (sizes - 1), np.float64))


CPU = costs_of(0.2)
"""What the CPU lane's matrix kernels measure like."""


def chosen(chances: list[list[float]], costs: StepCosts = CPU, most: int = 32) -> list[int]:
    return list(choose_drafts(np.array(chances, np.float64), most, costs))


def can_pay(num_sequences: int, costs: StepCosts) -> bool:
    return least_chance(num_sequences, 16, 32, costs) != NEVER


def run_of(rate: float, depth: int = 16) -> list[float]:
    return [rate ** (k + 1) for k in range(depth)]


def test_sure_drafts_are_all_taken_and_hopeless_ones_are_not() -> None:
    assert chosen([run_of(1.0)]) == [16]
    assert chosen([run_of(0.05)]) == [0]
    assert chosen([run_of(0.0)]) == [0]


def test_the_length_follows_the_chances() -> None:
    lengths = [chosen([run_of(rate)])[0] for rate in (0.2, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)]
    assert lengths == sorted(lengths) and lengths[0] == 0 and lengths[-1] == 16
    assert 2 <= lengths[3] <= 6


def test_a_gain_within_the_error_of_estimates_is_left_alone() -> None:
    """One draft of chance 0.25 on rows of 0.2 would bring 4 %."""
    assert MIN_GAIN > 1.25 / 1.2 - 1
    assert chosen([[0.25]]) == [0]
    assert chosen([[0.35]]) == [1]


def test_free_rows_are_filled_up_to_the_bucket_and_not_beyond() -> None:
    padded = StepCosts(guess_for((8, 32)))
    assert chosen([run_of(0.6)], padded) == [7]
    assert chosen([run_of(0.6), run_of(0.6)], padded) == [3, 3]
    assert chosen([run_of(1.0)], StepCosts(guess_for((1, 32)))) == [16]


def test_a_step_that_costs_by_the_row_gets_no_drafts() -> None:
    """As where a batch fills the lane: a row costs as much as it can bring."""
    linear = costs_of(1.0)
    assert chosen([run_of(1.0)], linear) == [0]
    assert not can_pay(1, linear)


def test_large_batches_switch_drafts_off() -> None:
    """The rows of a large batch cost what they bring, unless every draft is sure to come."""
    assert can_pay(8, CPU) and not can_pay(48, CPU)
    for num_sequences, rate in ((32, 0.95), (16, 0.85), (8, 0.75), (4, 0.5)):
        assert chosen([run_of(rate)] * num_sequences) == [0] * num_sequences
    assert all(chosen([run_of(0.97)] * 8))


def test_if_nothing_can_pay_then_nothing_is_chosen_even_when_sure() -> None:
    for num_sequences in range(1, 40):
        if not can_pay(num_sequences, CPU):
            assert not any(chosen([run_of(1.0)] * num_sequences))


@settings(deadline=None, max_examples=60)
@given(
    rates=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5),
    per_row=st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0]),
)
def test_below_the_least_chance_nothing_is_ever_chosen(rates: list[float], per_row: float) -> None:
    costs = costs_of(per_row)
    chances = [run_of(rate) for rate in rates]
    least = least_chance(len(rates), 16, 32, costs)
    if max(chance[0] for chance in chances) <= least:
        assert not any(chosen(chances, costs))


def test_the_gate_follows_the_costs() -> None:
    costs = StepCosts()
    gate = DraftGate(16, 32, costs)
    before = gate.least_chance(1)
    assert before == least_chance(1, 16, 32, costs)
    for size in (1, 2, 4, 8, 17):
        costs.observe(size, float(size))
    assert {gate.least_chance(1) for _ in range(200)} == {before, least_chance(1, 16, 32, costs)}
    assert gate.least_chance(1) > before


def test_those_with_better_chances_get_more() -> None:
    long, short, none = chosen([run_of(0.97), run_of(0.75), run_of(0.1)])
    assert long > short >= 0 and none == 0 and long > 0


def test_one_that_repeats_itself_may_not_slow_all_the_others_down() -> None:
    assert chosen([run_of(0.99)])[0] == 16
    assert chosen([run_of(0.99)] + [run_of(0.0)] * 7)[0] <= 1


def test_the_limit_on_rows_holds() -> None:
    assert sum(chosen([run_of(0.99)] * 2, most=5)) <= 5
    assert chosen([run_of(0.99)], most=0) == [0]


def test_no_sequences_and_no_depth_are_no_drafts() -> None:
    assert choose_drafts(np.zeros((0, 4)), 8, CPU).tolist() == []
    assert choose_drafts(np.zeros((3, 0)), 8, CPU).tolist() == [0, 0, 0]


def fairness(chances: list[list[float]], numbers: tuple[int, ...], costs: StepCosts) -> float:
    tokens = sum(math.log(1 + sum(c[:n])) for c, n in zip(chances, numbers, strict=True))
    num_rows = sum(numbers)
    slower = costs.relative(len(chances), num_rows)[-1] if num_rows else 1.0
    return tokens - len(chances) * math.log(slower)


@settings(deadline=None, max_examples=60)
@given(
    rates=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3),
    per_row=st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0]),
    most=st.integers(0, 8),
)
def test_no_other_choice_would_be_better(rates: list[float], per_row: float, most: int) -> None:
    chances = [run_of(rate, 4) for rate in rates]
    costs = costs_of(per_row)
    every = itertools.product(range(5), repeat=len(rates))
    best = max(fairness(chances, each, costs) for each in every if sum(each) <= most)
    numbers = tuple(chosen(chances, costs, most))
    assert sum(numbers) <= most
    least = len(rates) * math.log1p(MIN_GAIN)
    if any(numbers):
        assert fairness(chances, numbers, costs) == pytest.approx(best, abs=1e-9)
    else:
        assert best < least + 1e-9
