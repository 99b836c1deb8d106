"""The search for factors: what it may not do, and what it is for."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.quantize.blocks import BlockFormat, plain_values
from engine.quantize.scaling import NUM_STEPS, scale_factors, search_scaling

Floats = NDArray[np.float32]
BLOCKS = BlockFormat(4, 32, False)


def rounded(matrix: Floats) -> Floats:
    return plain_values(matrix, BLOCKS)


def outputs_error(weights: Floats, inputs: Floats, factors: Floats) -> float:
    exact = inputs @ weights.T
    scaled = (inputs / factors) @ rounded(weights * factors).T
    return float(np.square(scaled - exact).sum() / np.square(exact).sum())


@pytest.fixture
def weights() -> Floats:
    return np.random.default_rng(0).standard_normal((96, 128)).astype(np.float32)


def test_inputs_that_are_large_get_exact_weights(weights: Floats) -> None:
    rng = np.random.default_rng(1)
    inputs = rng.standard_normal((200, 128)).astype(np.float32)
    inputs[:, ::32] *= 30
    found = search_scaling([weights], inputs, np.abs(inputs).mean(axis=0), rounded)
    assert found.alpha > 0
    assert found.error < 0.6 * found.plain_error
    assert found.factors[0] > 2 * found.factors[1]


def test_what_is_reported_is_the_error_of_the_outputs(weights: Floats) -> None:
    inputs = np.random.default_rng(2).standard_normal((64, 128)).astype(np.float32)
    inputs[:, 5] *= 20
    found = search_scaling([weights], inputs, np.abs(inputs).mean(axis=0), rounded)
    assert found.error == pytest.approx(outputs_error(weights, inputs, found.factors), rel=1e-3)
    ones = np.ones(128, np.float32)
    assert found.plain_error == pytest.approx(outputs_error(weights, inputs, ones), rel=1e-3)


def test_equal_inputs_are_not_scaled(weights: Floats) -> None:
    inputs = np.random.default_rng(3).standard_normal((64, 128)).astype(np.float32)
    found = search_scaling([weights], inputs, np.ones(128, np.float32), rounded)
    assert found.alpha == 0
    assert found.error == found.plain_error
    np.testing.assert_array_equal(found.factors, np.ones(128, np.float32))


def test_it_is_never_worse_than_no_scaling() -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        matrices = [rng.standard_t(3, (32, 64)).astype(np.float32) for _ in range(2)]
        inputs = (rng.standard_normal((50, 64)) * rng.lognormal(0, 2, 64)).astype(np.float32)
        found = search_scaling(matrices, inputs, np.abs(inputs).mean(axis=0), rounded)
        assert found.error <= found.plain_error
        assert found.alpha in [step / NUM_STEPS for step in range(NUM_STEPS)]


def test_factors_are_centred_and_dead_inputs_bounded() -> None:
    factors = scale_factors(np.array([0, 1, 4, 100], np.float32), 0.5)
    assert factors.max() * factors.min() == pytest.approx(1)
    assert np.isfinite(factors).all()
    assert (np.diff(factors) > 0).all()


def test_equal_magnitudes_get_equal_factors() -> None:
    factors = scale_factors(np.array([3, 7, 3, 7], np.float32), 0.35)
    assert factors[0] == factors[2]
    assert factors[1] == factors[3]
