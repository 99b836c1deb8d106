"""What a step costs by its size: measured where it was, guessed in proportion elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.step_costs import StepCosts, guess_for, guessed_cost


def test_before_the_first_step_the_guess_counts() -> None:
    costs = StepCosts()
    assert not costs.is_measured
    assert costs.relative(1, 3).tolist() == pytest.approx([1.3, 1.6, 1.9])
    assert costs.relative(5, 1).tolist() == pytest.approx([2.5 / 2.2])


def test_the_guess_is_scaled_to_what_was_seen() -> None:
    costs = StepCosts()
    costs.observe(1, 0.010)
    assert costs.is_measured
    assert costs.seconds(1) == 0.010 and costs.seconds(5) == pytest.approx(0.022)
    assert costs.relative(1, 2).tolist() == pytest.approx([1.3, 1.6])


def test_between_two_measured_sizes_the_guess_is_bent_to_meet_both() -> None:
    costs = StepCosts()
    for _ in range(60):
        costs.observe(1, 0.010)
        costs.observe(9, 0.020)
    assert costs.seconds(1) == pytest.approx(0.010, rel=0.01)
    assert costs.seconds(9) == pytest.approx(0.020, rel=0.03)
    assert 0.012 < costs.seconds(5) < 0.022
    assert costs.seconds(17) == pytest.approx(0.020 * 5.8 / 3.4, rel=0.03)


def test_a_larger_step_is_never_cheaper_than_a_smaller_one() -> None:
    costs = StepCosts()
    for size, seconds in ((1, 0.012), (4, 0.011), (8, 0.016)):
        for _ in range(50):
            costs.observe(size, seconds)
    assert (np.diff([costs.seconds(size) for size in range(1, 40)]) >= 0).all()
    assert costs.seconds(1) == pytest.approx(0.011, rel=0.1)


def test_averages_follow_the_machine() -> None:
    costs = StepCosts()
    for _ in range(60):
        costs.observe(1, 0.010)
    for _ in range(60):
        costs.observe(1, 0.013)
    assert costs.seconds(1) == pytest.approx(0.013, rel=0.05)


def test_one_slow_step_moves_little() -> None:
    costs = StepCosts()
    for _ in range(20):
        costs.observe(1, 0.010)
    costs.observe(1, 5.0)
    assert costs.seconds(1) < 0.0108


def test_neighbouring_sizes_share_what_they_know() -> None:
    """A lucky step of one size is not a reason to prefer that size."""
    costs = StepCosts()
    for _ in range(40):
        for size in (8, 9, 11, 12):
            costs.observe(size, 0.010 * size)
    costs.observe(10, 0.070)
    assert costs.seconds(10) > 0.091


def test_one_slow_step_does_not_forbid_a_size_for_ever() -> None:
    costs = StepCosts()
    costs.observe(1, 0.010)
    costs.observe(2, 60.0)
    assert costs.seconds(2) <= 0.020
    for _ in range(2400):
        costs.observe(1, 0.010)
    assert costs.seconds(2) == pytest.approx(0.013)


def test_sizes_out_of_bounds_change_nothing() -> None:
    costs = StepCosts()
    costs.observe(0, 1.0)
    costs.observe(1_000_000, 1.0)
    costs.observe(3, 0.0)
    assert not costs.is_measured
    assert costs.seconds(10_000) == costs.seconds(512)
    assert costs.relative(500, 100)[-1] == costs.seconds(512) / costs.seconds(500)


def test_padding_to_buckets_makes_rows_free() -> None:
    cost = guess_for((1, 8, 32))
    sizes = np.array([1, 2, 8, 9, 32, 40])
    expected = guessed_cost(np.array([1, 8, 8, 32, 32, 40]))
    assert np.array_equal(cost(sizes), expected)
    assert guess_for(()) is guessed_cost
    assert StepCosts(cost).relative(2, 6).tolist() == [1.0] * 6


@given(
    st.lists(
        st.tuples(st.integers(-1, 600), st.floats(-1, 100, allow_subnormal=False)), max_size=60
    ),
    st.integers(1, 600),
)
def test_whatever_is_observed_costs_are_finite_positive_and_rise(
    observed: list[tuple[int, float]], size: int
) -> None:
    costs = StepCosts()
    for num_tokens, seconds in observed:
        costs.observe(num_tokens, seconds)
    relative = costs.relative(size, 40)
    assert np.isfinite(relative).all() and relative[0] >= 1
    assert (np.diff(relative) >= -1e-12).all()
