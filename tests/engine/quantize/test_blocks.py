"""The block quantizers: never worse than plain rounding, exact where the weights allow it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.export.packing import unpack
from engine.quantize.blocks import (
    BlockFormat,
    block_grams,
    plain_values,
    quantize,
    round_plainly,
)

FORMATS = [
    BlockFormat(bits, size, is_symmetric)
    for bits in (4, 8)
    for size in (32, 64, 128)
    for is_symmetric in (True, False)
]
Floats = NDArray[np.float32]


def random_weights(seed: int, rows: int = 24, cols: int = 256) -> Floats:
    """Heavy-tailed, as weights are."""
    return np.random.default_rng(seed).standard_t(4, (rows, cols)).astype(np.float32)


def random_inputs(seed: int, cols: int = 256) -> Floats:
    """Some columns are much larger than others, and they are correlated."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((300, cols)) @ (
        np.eye(cols) + rng.standard_normal((cols, cols)) / 8
    )
    return np.asarray(mixed * np.exp(rng.standard_normal(cols)), np.float32)


def block_errors(approximate: Floats, weights: Floats, size: int) -> NDArray[np.float64]:
    """[N, blocks]: squared error of each block."""
    difference = (approximate - weights).astype(np.float64).reshape(len(weights), -1, size)
    return np.asarray(np.square(difference).sum(axis=2))


@pytest.mark.parametrize("block_format", FORMATS, ids=str)
def test_no_block_is_worse_than_by_plain_rounding(block_format: BlockFormat) -> None:
    weights, size = random_weights(0), block_format.block_size
    plain = block_errors(unpack(round_plainly(weights, block_format)), weights, size)
    searched = block_errors(unpack(quantize(weights, block_format)), weights, size)
    assert (searched <= plain * (1 + 1e-6)).all()


@pytest.mark.parametrize(("is_symmetric", "gain"), [(True, 0.8), (False, 0.97)])
def test_the_search_gains_something_at_4_bits(is_symmetric: bool, gain: float) -> None:
    weights, block_format = random_weights(1), BlockFormat(4, 32, is_symmetric)
    plain = np.square(plain_values(weights, block_format) - weights).sum()
    searched = np.square(unpack(quantize(weights, block_format)) - weights).sum()
    assert searched < gain * plain


@pytest.mark.parametrize("block_format", FORMATS, ids=str)
def test_with_grams_the_error_of_the_outputs_is_what_falls(block_format: BlockFormat) -> None:
    """Summed over its blocks' own outputs, which is what the grams measure."""
    weights, inputs, size = random_weights(2), random_inputs(3), block_format.block_size
    grams = block_grams(inputs, size)

    def error(approximate: Floats) -> float:
        blocks = (approximate - weights).reshape(len(weights), -1, size)
        return float(np.einsum("nbi,bij,nbj->", blocks, grams, blocks, dtype=np.float64))

    by_outputs = error(unpack(quantize(weights, block_format, grams)))
    assert by_outputs <= error(unpack(quantize(weights, block_format))) * (1 + 1e-6)
    assert by_outputs <= error(unpack(round_plainly(weights, block_format))) * (1 + 1e-6)


def test_grams_are_the_mean_of_the_outer_products() -> None:
    inputs = random_inputs(4, cols=64)
    grams = block_grams(inputs, 32)
    for block in range(2):
        part = inputs[:, 32 * block : 32 * block + 32].astype(np.float64)
        np.testing.assert_allclose(grams[block], part.T @ part / len(part), rtol=1e-4, atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.integers(0, 2**32 - 1),
    st.floats(2.0**-10, 2.0**10, width=16),
)
def test_weights_that_are_levels_times_a_scale_stay_as_they_are(
    block_format: BlockFormat, seed: int, scale: float
) -> None:
    """When the levels use the whole range: otherwise the scale cannot be known."""
    rng = np.random.default_rng(seed)
    size, middle = block_format.block_size, block_format.middle
    levels = rng.integers(0, block_format.max_level + 1, (3, size))
    levels[:, 0], levels[:, 1] = 0, block_format.max_level
    zero = middle if block_format.is_symmetric else int(rng.integers(1, block_format.max_level))
    weights = ((levels - zero) * np.float32(scale)).astype(np.float32)
    result = unpack(quantize(weights, block_format))
    np.testing.assert_allclose(result, weights, rtol=0, atol=2e-5 * float(np.abs(weights).max()))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(1, 5), st.integers(1, 300), st.integers(0, 99))
def test_shapes_for_any_number_of_rows_and_columns(
    block_format: BlockFormat, num_rows: int, num_cols: int, seed: int
) -> None:
    weights = random_weights(seed, num_rows, num_cols)
    packed = quantize(weights, block_format)
    num_blocks = -(-num_cols // block_format.block_size)
    assert packed.scales is not None
    assert packed.data.shape == (
        num_rows,
        num_blocks,
        block_format.block_size * block_format.bits // 8,
    )
    assert packed.scales.shape == (num_rows, num_blocks)
    assert (packed.zero_points is None) == block_format.is_symmetric
    if packed.zero_points is not None:
        assert packed.zero_points.shape == (num_rows, -(-num_blocks * block_format.bits // 8))
    assert (packed.num_rows, packed.num_cols) == weights.shape == unpack(packed).shape
    assert plain_values(weights, block_format).shape == weights.shape


def test_padding_columns_change_nothing() -> None:
    weights, block_format = random_weights(5, cols=64), BlockFormat(4, 32, True)
    whole = unpack(quantize(weights, block_format))
    cut = unpack(quantize(weights[:, :40], block_format))
    np.testing.assert_array_equal(cut[:, :32], whole[:, :32])


def test_the_number_of_threads_and_of_rows_at_a_time_changes_no_bit() -> None:
    weights, block_format = random_weights(6, rows=700), BlockFormat(4, 32, False)
    grams = block_grams(random_inputs(7), 32)
    one = quantize(weights, block_format, grams)
    two = quantize(weights, block_format, grams, num_threads=2)
    alone = quantize(weights[:5], block_format, grams)
    np.testing.assert_array_equal(one.data, two.data)
    np.testing.assert_array_equal(unpack(one), unpack(two))
    np.testing.assert_array_equal(unpack(one)[:5], unpack(alone))


@pytest.mark.parametrize("block_format", FORMATS, ids=str)
def test_zeros_stay_zeros(block_format: BlockFormat) -> None:
    zeros = np.zeros((2, 128), np.float32)
    np.testing.assert_array_equal(unpack(quantize(zeros, block_format)), zeros)
    np.testing.assert_array_equal(unpack(round_plainly(zeros, block_format)), zeros)


def test_bits_per_weight_count_scales_and_zero_points() -> None:
    assert BlockFormat(4, 32, True).bits_per_weight == 5
    assert BlockFormat(4, 32, False).bits_per_weight == 5.125
    assert BlockFormat(8, 128, True).bits_per_weight == 8.25
