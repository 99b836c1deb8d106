"""Attention over quantized pages as the kernels do it, in plain numpy: the same roundings.

A query has 16 bits, and so have the weights of each tile of 128 keys, times their values' scales
and relative to the largest of them; sums of products are exact. What remains open is the order in
which weights are added up. The float32 steps that decide what a weight is rounded to are those
of the kernels to the bit (`attention_simd.py`, `simd.py`): a fused multiply-add is one of float64
that is rounded once more, which differs in one of 2 ** 29 cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.batch import Float32Array
from engine.kernels.attention_simd import (
    EXP2_POLYNOMIAL,
    EXP2_UNDERFLOW,
    MAX_WEIGHT_LEVEL,
    MIN_WEIGHT,
)
from engine.kernels.rounding_simd import MAX_QUERY_LEVEL
from engine.kernels.simd import (
    EXP_POLYNOMIAL,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    TANH_ONE,
    TANH_POLYNOMIAL,
    TANH_SMALL,
)
from engine.kv_format import MAX_MAGNITUDE, MIN_SCALE
from engine.vector_sizes import SPAN_KEYS, TILE_KEYS


class Tokens(NamedTuple):
    """A sequence's tokens: levels as float32 [KV, tokens, D], D padded; scales [KV, tokens, G]."""

    keys: Float32Array
    key_scales: Float32Array
    value_scales: Float32Array
    values: Float32Array


def rounded_attention(
    queries: Float32Array, tokens: Tokens, seen: slice, softcap: np.float32
) -> Float32Array:
    """[KV, heads of a group, D]: of one token's queries over a slice of its sequence's tokens."""
    scores, factors = _scores(queries, tokens.keys[:, seen], tokens.key_scales[:, seen], softcap)
    scales = tokens.value_scales[:, seen].swapaxes(-1, -2)[:, None]  # [KV, 1, G, keys]
    values = tokens.values[:, seen].astype(np.float64)
    largest_of_all = (scores * factors).max(axis=-1, keepdims=True)
    largest = np.full(factors.shape, -np.inf, np.float32)
    total, sums = np.zeros(factors.shape), np.zeros(queries.shape)
    for start in range(seen.start // TILE_KEYS * TILE_KEYS, seen.stop, TILE_KEYS):
        tile = slice(max(start - seen.start, 0), start + TILE_KEYS - seen.start)
        if start % SPAN_KEYS == 0:
            largest[:] = -np.inf
        highest = scores[..., tile].max(axis=-1, keepdims=True)
        largest = np.maximum(largest, highest * factors)
        weights = exp2(_fma(scores[..., tile], factors, -largest))
        share = np.exp2(largest.astype(np.float64) - largest_of_all)
        total += share * weights.sum(axis=-1, dtype=np.float64, keepdims=True)
        sums += share * _weighted_sum(weights[..., None, :] * scales[..., tile], values[:, tile])
    return (sums / total).astype(np.float32)


def round_query(queries: Float32Array) -> tuple[Float32Array, Float32Array]:
    """[..., D] as 16-bit integers (in float32) and scales [..., 1]; NaN if it is not finite."""
    largest = np.abs(queries).max(axis=-1, keepdims=True)
    is_finite = largest < MAX_MAGNITUDE
    has_levels = is_finite & (largest > MIN_SCALE)
    divisor = np.where(has_levels, largest, np.float32(1))
    levels = np.rint(queries * (np.float32(MAX_QUERY_LEVEL) / divisor))
    scales = np.where(has_levels, divisor / np.float32(MAX_QUERY_LEVEL), np.float32(1))
    return np.where(has_levels, levels, 0), np.where(is_finite, scales, np.float32(np.nan))


def _scores(
    queries: Float32Array, keys: Float32Array, key_scales: Float32Array, softcap: np.float32
) -> tuple[Float32Array, Float32Array]:
    """[KV, heads, keys], and [KV, heads, 1]: what makes exponents of 2 of them."""
    levels, scales = round_query(queries)
    num_groups = key_scales.shape[-1]
    scores = np.zeros((*queries.shape[:2], keys.shape[1]), np.float32)
    grouped = (np.split(x.astype(np.float64), num_groups, axis=-1) for x in (levels, keys))
    for group, (q, k) in enumerate(zip(*grouped, strict=True)):
        products = np.einsum("hrd,hkd->hrk", q, k).astype(np.float32)
        scores = _fma(products, key_scales[:, None, :, group], scores)
    if softcap > 0:
        capped = softcap * tanh(scores * scales / softcap)
        return capped, np.full_like(scales, LOG2_E)
    return scores, scales * np.float32(LOG2_E)


def _weighted_sum(weights: Float32Array, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[KV, heads, D]: `weights` [KV, heads, G, keys], rounded, times `values` [KV, keys, D]."""
    largest = np.fmax.reduce(weights, axis=-1, keepdims=True)
    is_some = largest > np.float32(MIN_WEIGHT)
    divisor = np.where(is_some, largest, np.float32(1))
    inverse = np.where(is_some, np.float32(MAX_WEIGHT_LEVEL) / divisor, np.float32(0))
    levels = np.rint(weights.astype(np.float64) * inverse)
    factors = np.where(is_some, divisor * np.float32(1 / MAX_WEIGHT_LEVEL), np.float32(0))
    num_kv_heads, num_keys, size = values.shape
    grouped = values.reshape(num_kv_heads, num_keys, weights.shape[2], -1)
    products = np.einsum("hrgk,hkgd->hrgd", levels, grouped).astype(np.float32)
    scaled: NDArray[np.float64] = products.astype(np.float64) * factors
    return scaled.reshape(*weights.shape[:2], size)


def _fma(
    a: Float32Array, b: Float32Array | np.float32, c: Float32Array | np.float32
) -> Float32Array:
    exact = np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)
    return exact.astype(np.float32)


def _polynomial(x: Float32Array, coefficients: Sequence[float]) -> Float32Array:
    p = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        p = _fma(p, x, np.float32(coefficient))
    return p


def exp2(x: Float32Array) -> Float32Array:
    """As `attention_simd.power_of_two`."""
    x = np.maximum(x, np.float32(EXP2_UNDERFLOW))
    n = np.rint(x)
    power = _polynomial(x - n, (*EXP2_POLYNOMIAL, 1.0)).astype(np.float64) * np.exp2(n)
    return np.where(x > EXP2_UNDERFLOW, power, np.float64(0) * x).astype(np.float32)


def tanh(x: Float32Array) -> Float32Array:
    """As `simd.Emitter.tanh`."""
    size, one = np.abs(x), np.float32(1)
    twice = np.minimum(size, np.float32(TANH_ONE)) * np.float32(2)
    n = np.rint(_fma(twice, np.float32(LOG2_E), np.float32(0)))
    r = _fma(n, np.float32(-LN2_LOW), _fma(n, np.float32(-LN2_HIGH), twice))
    p = _polynomial(r, EXP_POLYNOMIAL)
    grown = (_fma(p * r, r, r) + one) * np.exp2(n) + one
    large = np.copysign(one - np.float32(2) / grown, x)
    square = x * x
    small = _fma(_polynomial(square, TANH_POLYNOMIAL) * square, x, x)
    return np.where(size < np.float32(TANH_SMALL), small, large)
