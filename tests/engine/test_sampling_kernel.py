"""One row to one token: the draw is exactly the inverse of the filtered distribution."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.kernels.sampling_kernel import (
    Scratch,
    log_sum_exp,
    make_scratch,
    penalize,
    sample_row,
    uniform,
)
from engine.kernels.simd import LANES

pytestmark = pytest.mark.usefixtures("kernels")
Floats = NDArray[np.float64]


def uniforms(seeds: range, positions: range) -> Floats:
    """[seeds, positions]"""
    return np.array([[uniform(np.uint64(s), p) for p in positions] for s in seeds])


@dataclass(frozen=True)
class Filters:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def draw(logits: object, filters: Filters, seed: int, position: int) -> int:
    values = np.array(logits, np.float32)
    before = values.copy()
    sample: Any = sample_row
    token = sample(values, *astuple(filters), np.uint64(seed), position, scratch_of(values))
    assert np.array_equal(values, before, equal_nan=True), "the logits must not change"
    return int(token)


def scratch_of(values: NDArray[np.float32]) -> Scratch:
    """Memory as a row before may have left it."""
    scratch = make_scratch(len(values))
    for array in scratch:
        array[:] = 7
    return scratch


def distribution(logits: object, filters: Filters, slack: float = 0.0) -> Floats:
    """Exact probabilities in float64, in the kernel's order: min_p, then top_k, then top_p.

    With `slack`, what lies that little below a threshold stays too.
    """
    scaled = np.array(logits, np.float32).astype(np.float64) / filters.temperature
    p = np.exp(scaled - scaled.max())
    threshold = filters.min_p
    if 0 < filters.top_k < len(p):
        threshold = max(threshold, np.sort(p)[-filters.top_k])
    p[p < threshold * (1 - slack)] = 0
    if filters.top_p < 1:
        ordered = np.sort(p)[::-1]
        reached = np.searchsorted(np.cumsum(ordered), filters.top_p * p.sum())
        p[p < ordered[min(int(reached), len(p) - 1)] * (1 - slack)] = 0
    return np.asarray(p / p.sum())


def test_uniform_is_a_function_of_seed_and_position() -> None:
    first = uniforms(range(20), range(20))
    assert np.array_equal(first, uniforms(range(20), range(20)))
    assert len(np.unique(first)) == 400
    assert first.min() >= 0 and first.max() < 1


def test_uniform_takes_any_seed_of_64_bits() -> None:
    largest = 2**64 - 1
    drawn = {uniform(np.uint64(seed), p) for seed in (0, 1, 2**63, largest) for p in (0, 2**31)}
    assert len(drawn) == 8 and all(0 <= u < 1 for u in drawn)


@pytest.mark.parametrize(
    ("seeds", "positions"), [(range(1), range(40_000)), (range(40_000), range(1))]
)
def test_uniform_is_uniform_along_positions_and_along_seeds(seeds: range, positions: range) -> None:
    drawn = uniforms(seeds, positions).reshape(-1)
    assert abs(drawn.mean() - 1 / 2) < 4 * np.sqrt(1 / 12 / len(drawn))
    assert abs(drawn.var() - 1 / 12) < 4 * np.sqrt(1 / 180 / len(drawn))
    counts = np.histogram(drawn, 256, (0, 1))[0]
    assert_chi_square(counts, np.full(256, len(drawn) / 256))


def assert_chi_square(counts: NDArray[np.int64], expected: Floats) -> None:
    """Within five standard deviations of what chance gives; seeds are fixed, so never flaky."""
    used = expected > 0
    assert (counts[~used] == 0).all()
    statistic = float(((counts[used] - expected[used]) ** 2 / expected[used]).sum())
    freedom = int(used.sum()) - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 1, f"chi-square {statistic:.1f}"


@pytest.mark.parametrize("step", [(0, 1), (1, 0), (1, 1), (1, -1), (0, 2), (2, 0), (16, 0)])
def test_neighbouring_seeds_and_positions_are_independent(step: tuple[int, int]) -> None:
    grid = uniforms(range(220), range(220))
    down, right = step
    here = grid[: 220 - down, max(-right, 0) : 220 - max(right, 0)]
    there = grid[down:, max(right, 0) : 220 + min(right, 0)]
    pairs = np.histogram2d(here.ravel(), there.ravel(), 12, ((0, 1), (0, 1)))[0]
    assert_chi_square(pairs.astype(np.int64).ravel(), np.full(144, here.size / 144))
    correlation = np.corrcoef(here.ravel(), there.ravel())[0, 1]
    assert abs(correlation) < 4 / np.sqrt(here.size)


def test_no_seed_repeats_the_draws_of_another_in_another_order() -> None:
    grid = uniforms(range(64), range(64))
    assert len(np.unique(grid)) == grid.size


LOGITS = [2.0, -1.0, 0.5, 0.5, 3.0, -4.0, 0.0, 1.5, 1.5, 1.5, -0.3, 2.2, -2.0, 0.9, 0.1, -1.2, 2.9]


@pytest.mark.parametrize(
    "filters",
    [
        Filters(),
        Filters(temperature=0.5),
        Filters(temperature=2.0),
        Filters(top_k=5),
        Filters(top_k=6),  # three equal logits at the edge: they stay together
        Filters(top_p=0.8),
        Filters(top_p=0.05),
        Filters(min_p=0.2),
        Filters(temperature=1.3, top_k=9, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(filters: Filters) -> None:
    drawn = [draw(LOGITS, filters, 1234, position) for position in range(3000)]
    counts = np.bincount(drawn, minlength=len(LOGITS))
    assert_chi_square(counts, 3000 * distribution(LOGITS, filters))


def test_filters_keep_the_tokens_that_they_promise() -> None:
    def kept(filters: Filters) -> set[int]:
        return {draw(LOGITS, filters, 1, position) for position in range(2000)}

    assert kept(Filters(top_k=2)) == {4, 16}
    assert kept(Filters(top_k=5)) == kept(Filters(top_k=7)) == {4, 16, 11, 0, 7, 8, 9}
    assert kept(Filters(min_p=0.9)) == {4, 16}
    assert kept(Filters(min_p=1.0)) == kept(Filters(top_p=1e-6)) == {4}
    assert kept(Filters(top_k=10**9)) == kept(Filters(top_k=17)) == kept(Filters())


def test_equal_logits_are_equally_likely_and_stay_together() -> None:
    equal = np.zeros(20)
    for filters in (Filters(), Filters(top_k=3), Filters(top_p=0.3), Filters(min_p=1.0)):
        drawn = [draw(equal, filters, 7, position) for position in range(4000)]
        assert_chi_square(np.bincount(drawn, minlength=20), np.full(20, 200.0))


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    logits = np.array([-60.0, 55.0, 54.5, 0.0, 3e4, 3e4 - 1], np.float32)
    assert {draw(logits, Filters(temperature), 3, position) for position in range(50)} == {4}


def test_a_large_temperature_makes_all_tokens_alike() -> None:
    drawn = [draw(LOGITS, Filters(1e6), 5, position) for position in range(3400)]
    assert_chi_square(np.bincount(drawn, minlength=17), np.full(17, 200.0))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 16, 19])
@pytest.mark.parametrize("filters", [Filters(), Filters(top_k=3), Filters(top_p=0.5)], ids=str)
def test_a_nan_or_infinity_gives_no_token(bad: float, at: int, filters: Filters) -> None:
    logits = np.linspace(-1, 1, 20)
    logits[at] = bad
    assert draw(logits, filters, 0, 0) == -1


def test_a_row_without_any_possible_token_gives_none() -> None:
    assert draw(np.full(20, -np.inf), Filters(), 0, 0) == -1


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full(40, -np.inf)
    logits[[0, 15, 39]] = [0.0, 1.0, 0.5]
    for filters in (Filters(), Filters(top_k=10), Filters(top_p=0.99)):
        drawn = [draw(logits, filters, 2, position) for position in range(1500)]
        expected = 1500 * distribution(logits, filters)
        assert_chi_square(np.bincount(drawn, minlength=40), expected)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 31, 33, 320, 1001])
def test_any_vocabulary_size_is_covered_to_its_last_token(size: int) -> None:
    logits = np.full(size, -20.0)
    logits[-1] = 20.0
    for filters in (Filters(), Filters(top_k=2), Filters(top_p=0.5)):
        assert draw(logits, filters, 0, 1) == size - 1
    flat = {draw(np.zeros(size), Filters(), 0, position) for position in range(8 * size + 40)}
    assert min(flat) == 0 or size > 40
    assert max(flat) < size


LOGIT = st.floats(-30, 30, width=32)


@given(
    logits=st.lists(LOGIT, min_size=1, max_size=70),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 80),
    top_p=st.floats(0.01, 1),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**20),
)
@settings(deadline=None, max_examples=300)
def test_the_token_is_the_inverse_of_the_allowed_distribution(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float,
    seed: int, position: int,
) -> None:  # fmt: skip
    assert_is_inverse(logits, Filters(temperature, top_k, top_p, min_p), seed, position)


@pytest.mark.parametrize("filters", [
    Filters(), Filters(0.7, top_k=50), Filters(top_p=0.9), Filters(1.5, 200, 0.95, 0.01),
    Filters(top_p=0.999), Filters(3.0, min_p=0.001),
], ids=str)  # fmt: skip
def test_a_large_vocabulary_is_no_different(filters: Filters) -> None:
    logits = np.random.default_rng(1).standard_normal(20_000, np.float32) * np.float32(3)
    for position in range(40):
        assert_is_inverse(logits, filters, 9, position)


def assert_is_inverse(logits: object, filters: Filters, seed: int, position: int) -> None:
    """The drawn token is where the cumulative distribution passes the uniform number."""
    token = draw(logits, filters, seed, position)
    wider, narrower = (
        replace(
            filters, top_p=min(filters.top_p * (1 + x), 1), min_p=min(filters.min_p * (1 - x), 1)
        )
        for x in (1e-4, -1e-4)
    )
    allowed = distribution(logits, wider, slack=1e-4)
    assert allowed[token] > 0
    if np.array_equal(allowed > 0, distribution(logits, narrower) > 0):
        # No threshold is so near to an element that rounding could decide.
        end = float(np.cumsum(allowed)[token])
        u = uniform(np.uint64(seed), position)
        assert end - allowed[token] - 1e-4 <= u <= end + 1e-4


def penalized(
    logits: object, token_ids: list[int], num_prompt: int,
    repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0,
) -> NDArray[np.float32]:  # fmt: skip
    values = np.array(logits, np.float32)
    counts = np.zeros(len(values), np.int32)
    strengths = (np.float32(x) for x in (repetition, presence, frequency))
    penalize(values, counts, np.array(token_ids, np.int32), num_prompt, *strengths)
    assert not counts.any(), "the scratch must be zero again"
    return values


def test_a_repetition_penalty_lowers_seen_tokens_whatever_their_sign() -> None:
    found = penalized([2.0, -2.0, 1.0, 0.0], [1, 0, 3], 1, repetition=1.5)
    assert found.tolist() == [np.float32(2.0) / np.float32(1.5), -3.0, 1.0, 0.0]


def test_a_repetition_penalty_counts_a_token_once_in_prompt_and_output() -> None:
    once = penalized([4.0, -1.0], [0, 1], 2, repetition=2.0)
    assert np.array_equal(once, [2.0, -2.0])
    assert np.array_equal(penalized([4.0, -1.0], [0, 0, 1, 1, 0], 2, repetition=2.0), once)


def test_presence_and_frequency_count_the_output_only() -> None:
    tokens = [0, 0, 1, 1, 1, 2]  # the first three are the prompt
    assert penalized([0.0] * 4, tokens, 3, presence=0.5).tolist() == [0, -0.5, -0.5, 0]
    assert penalized([0.0] * 4, tokens, 3, frequency=0.25).tolist() == [0, -0.5, -0.25, 0]
    both = penalized([1.0] * 4, tokens, 3, repetition=2.0, presence=0.5, frequency=0.25)
    assert both.tolist() == [0.5, -0.5, -0.25, 1.0]


def test_negative_penalties_raise_tokens() -> None:
    assert penalized([0.0, 0.0], [1], 0, presence=-1.0, frequency=-0.5).tolist() == [0, 1.5]
    assert penalized([1.0, -1.0], [0, 1], 0, repetition=0.5).tolist() == [2.0, -0.5]


def test_penalties_that_are_off_change_no_bit() -> None:
    logits = np.random.default_rng(0).standard_normal(50, np.float32)
    assert np.array_equal(penalized(logits, [1, 2, 2, 3], 2), logits)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 320, 4999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_log_sum_exp_agrees_with_float64(size: int, spread: float) -> None:
    logits = np.random.default_rng(size).standard_normal(size, np.float32) * np.float32(spread)
    scratch = np.zeros(-(-size // LANES) * LANES, np.float32)  # also its padding is set anew
    wide = logits.astype(np.float64)
    exact = wide.max() + np.log(np.exp(wide - wide.max()).sum())
    assert abs(log_sum_exp(logits, scratch) - exact) < 1e-6


def test_log_sum_exp_of_a_nan_is_a_nan() -> None:
    logits = np.array([1.0, np.nan, 2.0], np.float32)
    assert np.isnan(log_sum_exp(logits, np.zeros(16, np.float32)))


@pytest.mark.parametrize("filters", [Filters(), Filters(top_p=0.95), Filters(top_k=500)], ids=str)
def test_flat_and_steep_rows_of_a_large_vocabulary(filters: Filters) -> None:
    """Thousands of candidates, or one: the same definition."""
    rng = np.random.default_rng(4)
    flat = rng.standard_normal(30_001, np.float32) * np.float32(0.01)
    steep = rng.standard_normal(30_001, np.float32) * np.float32(0.5)
    steep[12_345] = 30.0
    for position in range(12):
        assert_is_inverse(flat, filters, 3, position)
        assert draw(steep, filters, 3, position) == 12_345
