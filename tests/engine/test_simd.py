"""The vector pieces, each called as the kernels call it and compared with numpy."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.kernels import simd

Float32Array = NDArray[np.float32]


exp: Any = numba.njit(lambda x: simd.exp(x))
row_max: Any = numba.njit(lambda row: simd.row_max(row.ctypes.data, row.shape[0] // 16))
row_exp: Any = numba.njit(
    lambda row, shift: simd.row_exp(row.ctypes.data, row.shape[0] // 16, shift)
)


row_softcap: Any = numba.njit(
    lambda row, cap: simd.row_softcap(row.ctypes.data, row.shape[0] // 16, cap)
)


def exp_of(x: float) -> np.float32:
    return np.float32(exp(np.float32(x)))


def random_row(size: int, spread: float = 1.0) -> Float32Array:
    values = np.random.default_rng(size).standard_normal(size, np.float32)
    return np.asarray(values * np.float32(spread), np.float32)


def test_the_exponential_errs_by_two_units_in_the_last_place_at_most() -> None:
    row = np.linspace(-87, 88, 160_000, dtype=np.float32)
    exact = np.exp(row.astype(np.float64))
    row_exp(row, np.float32(0))
    assert np.abs(row / exact - 1).max() < 2.5e-7


def test_the_exponential_is_exact_where_the_softmax_needs_it() -> None:
    assert exp_of(0.0) == 1.0
    assert exp_of(-np.inf) == 0.0 and exp_of(-87.01) == 0.0 and exp_of(-1e30) == 0.0
    assert exp_of(-87.0) > 0
    assert np.isnan(exp_of(np.nan))


def test_scalar_and_vector_exponential_are_equal() -> None:
    row = random_row(1600, 20.0)
    scalars = np.array([exp_of(x) for x in row], np.float32)
    row_exp(row, np.float32(0))
    assert np.array_equal(row, scalars)


@pytest.mark.parametrize("num_vectors", [1, 2, 7, 100])
def test_a_row_of_exponentials_is_shifted_and_summed(num_vectors: int) -> None:
    row = random_row(16 * num_vectors)
    expected = np.exp(row - np.float32(0.5))
    total = row_exp(row, np.float32(0.5))
    assert np.allclose(row, expected, rtol=4e-7, atol=0)
    assert np.isclose(total, expected.sum(dtype=np.float64), rtol=1e-6, atol=0)


def test_the_sum_does_not_depend_on_zeros_behind_it() -> None:
    """A masked key weighs nothing, so the tile's length does not matter."""
    short, long = random_row(32), np.full(128, -np.inf, np.float32)
    long[:32] = short
    assert row_exp(short, np.float32(0)) == row_exp(long, np.float32(0))
    assert not long[32:].any()


def test_the_largest_of_a_row_passes_over_nans() -> None:
    row = random_row(64)
    assert row_max(row) == row.max()
    largest = row.argmax()
    for at in (0, 15, 16, 63):
        spoiled = row.copy()
        spoiled[at] = np.nan
        assert row_max(spoiled) == np.nanmax(spoiled)
    row[largest] = np.inf
    assert row_max(row) == np.inf
    assert row_max(np.full(16, -np.inf, np.float32)) == -np.inf
    assert row_max(np.full(16, np.nan, np.float32)) == -np.inf


@pytest.mark.parametrize("cap", [0.5, 1.0, 50.0])
def test_the_softcap_is_a_scaled_hyperbolic_tangent(cap: float) -> None:
    row = np.concatenate([np.linspace(-12, 12, 16_000) * cap, np.linspace(-1e-3, 1e-3, 160)])
    row = row.astype(np.float32)
    exact = cap * np.tanh(row.astype(np.float64) / cap)
    row_softcap(row, np.float32(cap))
    assert np.abs(row - exact).max() < 3e-7 * cap
    assert np.abs(row / exact - 1).max() < 4e-7


def test_the_softcap_bounds_infinities_and_keeps_nans() -> None:
    row = np.full(16, 1.0, np.float32)
    row[:4] = np.inf, -np.inf, np.nan, 0.0
    row_softcap(row, np.float32(3))
    assert row[0] == 3 and row[1] == -3 and np.isnan(row[2]) and row[3] == 0


def test_a_nan_makes_the_sum_nan_and_no_other_element() -> None:
    row = random_row(48)
    clean = row.copy()
    row[20] = np.nan
    assert np.isnan(row_exp(row, np.float32(0)))
    row_exp(clean, np.float32(0))
    others = np.arange(48) != 20
    assert np.array_equal(row[others], clean[others]) and np.isnan(row[20])
