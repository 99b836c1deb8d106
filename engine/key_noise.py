"""How much noise quantized keys would put into attention scores, told from the weights alone.

Keys of a head share one scale (int8) or one a group of dimensions (int4), so a dimension that is
much larger than the others, such as Qwen2's key biases make, takes the levels away from the rest.
The size of a dimension follows from the weights: a normed input has entries of size g (the norm's
weight), so dimension d of a key has mean b_d and variance sum over j of (w_dj g_j)²; behind a norm
of its own it has the size of that norm's weight. Rounding to steps of size s adds variance s² / 12
to every element, and a score sums that over the dimensions, weighted by the query's size.
Knows arrays and the numbers of a model; no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engine.architectures.config import ModelConfig
from engine.batch import Float32Array
from engine.kernels.simd import INT4_GROUP_SIZE
from engine.kv_format import KV_FORMATS, PageFormat

PEAK_DEVIATIONS = 2.5
"""How far the largest of a head's dimensions lies above its typical size: of about a hundred
normal numbers, the largest is that many deviations away."""


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """[heads, D] each: the mean of every dimension over tokens, and its deviation from it."""

    means: Float32Array
    deviations: Float32Array

    @property
    def mean_squares(self) -> Float32Array:
        return np.asarray(self.means**2 + self.deviations**2, np.float32)


def head_sizes(
    weights: Float32Array,
    bias: Float32Array | None,
    input_sizes: Float32Array,
    head_size: int,
) -> HeadSizes:
    """Of queries or keys: `weights` [heads * D, K], `bias` [heads * D], `input_sizes` [K]."""
    scaled = weights * input_sizes
    deviations = np.sqrt(np.einsum("nk,nk->n", scaled, scaled))
    means = np.zeros_like(deviations) if bias is None else bias
    return HeadSizes(means.reshape(-1, head_size), deviations.reshape(-1, head_size))


def normed_sizes(norm: Float32Array, num_heads: int, head_size: int) -> HeadSizes:
    """Of queries or keys behind a norm, whose weight is [D] or [heads * D]."""
    sizes = np.abs(np.broadcast_to(norm.reshape(-1, head_size), (num_heads, head_size)))
    return HeadSizes(np.zeros_like(sizes), np.asarray(sizes, np.float32))


def score_noise(
    config: ModelConfig, queries: HeadSizes, keys: HeadSizes, key_format: PageFormat
) -> float:
    """Root mean square, over a layer's query heads, of the noise in their scores (in nats)."""
    if key_format.max_level == 0:
        return 0.0
    steps = _peaks(keys, config, key_format) / np.float32(key_format.max_level)  # [KV, D]
    # What is rounded to zero loses no more than itself.
    errors = np.minimum(steps**2 / np.float32(12), _turned(config, keys.mean_squares) / 2)
    group = config.num_heads // config.num_kv_heads
    variances = queries.mean_squares * np.repeat(errors, group, axis=0)  # [H, D]
    noise = variances.sum(axis=1) * np.float32(config.attention_scale) ** 2
    return float(np.sqrt(noise.mean()))


def _peaks(keys: HeadSizes, config: ModelConfig, key_format: PageFormat) -> Float32Array:
    """[KV, D]: the largest magnitude that shares a scale with each dimension."""
    sizes = np.abs(keys.means) + np.float32(PEAK_DEVIATIONS) * keys.deviations
    turned = np.sqrt(_turned(config, sizes**2))
    num_heads, head_size = turned.shape
    size = INT4_GROUP_SIZE if key_format.bits == 4 else head_size
    groups = np.pad(turned, ((0, 0), (0, -head_size % size))).reshape(num_heads, -1, size)
    return np.repeat(groups.max(axis=2), size, axis=1)[:, :head_size]


def _turned(config: ModelConfig, squares: Float32Array) -> Float32Array:
    """[KV, D]: rotation moves size between the two dimensions of a pair; each gets the sum."""
    half = max(rope.rotary_size for rope in config.ropes) // 2
    turned: Float32Array = squares.copy()
    sums: Float32Array = squares[:, :half] + squares[:, half : 2 * half]
    turned[:, :half] = turned[:, half : 2 * half] = sums
    return turned


def worst_noise(
    config: ModelConfig, layers: list[tuple[HeadSizes, HeadSizes]]
) -> Mapping[str, float]:
    """KV format → the noise of the layer that suffers most. `layers`: (queries, keys) of each."""
    return {
        name: max(score_noise(config, *layer, kv_format.keys) for layer in layers)
        for name, kv_format in KV_FORMATS.items()
    }
