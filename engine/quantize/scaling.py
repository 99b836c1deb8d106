"""Activation-aware weight quantization (AWQ, Lin et al. 2023): which inputs to protect, and how.

Inputs that are large deserve exact weights. Their columns are multiplied by a factor before
rounding, and whatever produces them is divided by it, which changes nothing in exact arithmetic.
Factors are (mean |x|) ** alpha, and alpha is searched for the least error of the outputs.
Knows arrays only; who produces the inputs is `layer_groups.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
Rounding = Callable[[Float32Array], Float32Array]
"""[N, K] → the values that the matrix has after quantization."""

NUM_STEPS = 20
"""Values of alpha that are tried, from 0 (no scaling) up to but excluding 1."""

_LEAST_MAGNITUDE = np.float32(1e-4)


@dataclass(frozen=True, slots=True)
class Scaling:
    """`factors` [K] multiply the columns. `error` and `plain_error` are the squared errors of the
    outputs with and without them, relative to the outputs."""

    factors: Float32Array
    alpha: float
    error: float
    plain_error: float


def search_scaling(
    matrices: Sequence[Float32Array],
    inputs: Float32Array,
    magnitudes: Float32Array,
    rounded: Rounding,
) -> Scaling:
    """The best scaling of the columns of `matrices` [N, K] that all read `inputs` [T, K].

    `magnitudes` [K] are the mean |x|, equal where the factors must be. Alpha 0 is tried first and
    wins a tie, so the result is never worse than no scaling.
    """
    power = max(sum(_power(inputs, matrix) for matrix in matrices), 1e-30)
    trials = []
    for step in range(NUM_STEPS):
        alpha = step / NUM_STEPS
        factors = scale_factors(magnitudes, alpha)
        error = sum(
            _power(inputs, rounded(matrix * factors) / factors - matrix) for matrix in matrices
        )
        trials.append((error / power, alpha, factors))
    error, alpha, factors = min(trials, key=lambda trial: trial[:2])
    return Scaling(factors, alpha, error, plain_error=trials[0][0])


def scale_factors(magnitudes: Float32Array, alpha: float) -> Float32Array:
    """[K] → magnitudes ** alpha, centred so that the largest and the least multiply to 1."""
    factors = np.maximum(magnitudes, _LEAST_MAGNITUDE) ** np.float32(alpha)
    return np.asarray(factors / np.sqrt(factors.max() * factors.min()), np.float32)


def _power(inputs: Float32Array, matrix: Float32Array) -> float:
    """The sum of the squares of all outputs."""
    outputs = inputs @ matrix.T
    return float(np.einsum("tn,tn->", outputs, outputs, dtype=np.float64))
