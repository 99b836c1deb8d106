"""Packs a linear layer as AWQ, GPTQ and compressed-tensors do, value by value, as published.

Written from the formats' descriptions with plain loops, so that it shares nothing with the readers
it is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Layer:
    """values [N, K], zeros and scales [N, G]; input k is of group `group_of[k]`."""

    bits: int
    values: NDArray[np.uint8]
    zeros: NDArray[np.uint8]
    scales: NDArray[np.float16]
    group_of: NDArray[np.int32]

    def weights(self) -> NDArray[np.float32]:
        """The published formula, one weight after the other."""
        out = np.empty(self.values.shape, np.float32)
        for n, k in np.ndindex(*out.shape):
            group = self.group_of[k]
            difference = np.float32(int(self.values[n, k]) - int(self.zeros[n, group]))
            out[n, k] = difference * np.float32(self.scales[n, group])
        return out


def random_layer(
    rows: int, cols: int, group_size: int, bits: int = 4, seed: int = 0, is_symmetric: bool = False
) -> Layer:
    """`group_size` 0: one group a row. Scaled so that outputs stay of the inputs' order."""
    rng = np.random.default_rng(seed)
    groups = -(-cols // group_size) if group_size else 1
    limit = 1 << bits
    zeros = rng.integers(1, limit, (rows, groups), np.uint8)
    if is_symmetric:
        zeros[:] = limit // 2
    scales = (0.5 + rng.random((rows, groups))) / (limit / 4 * cols**0.5)
    return Layer(
        bits=bits,
        values=rng.integers(0, limit, (rows, cols), np.uint8),
        zeros=zeros,
        scales=scales.astype(np.float16),
        group_of=(np.arange(cols) // group_size if group_size else np.zeros(cols)).astype(np.int32),
    )


def pack(values: NDArray[Any], bits: int, order: tuple[int, ...] | None = None) -> NDArray[Any]:
    """[R, C] → [R, ceil(C / p)] int32: place i of a word holds column order[i]."""
    per_word = 32 // bits
    places = order or tuple(range(per_word))
    words = np.zeros((values.shape[0], -(-values.shape[1] // per_word)), np.uint32)
    for row, word in np.ndindex(*words.shape):
        for place, offset in enumerate(places):
            column = word * per_word + offset
            if column < values.shape[1]:
                words[row, word] |= np.uint32(values[row, column]) << np.uint32(bits * place)
    return words.view(np.int32)


def awq_gemm(base: str, layer: Layer) -> Arrays:
    return {
        f"{base}.qweight": pack(layer.values.T, 4, AWQ_ORDER),
        f"{base}.qzeros": pack(layer.zeros.T, 4, AWQ_ORDER),
        f"{base}.scales": layer.scales.T,
    }


def awq_gemv(base: str, layer: Layer, width: int) -> Arrays:
    """`width` in words; what is not of a group is zero."""
    groups = layer.zeros.shape[1]
    zeros = np.zeros((len(layer.zeros), 8 * width), np.uint8)
    scales = np.zeros((len(layer.zeros), 8 * width), np.float16)
    zeros[:, :groups], scales[:, :groups] = layer.zeros, layer.scales
    return {
        f"{base}.qweight": pack(layer.values, 4),
        f"{base}.qzeros": pack(zeros, 4),
        f"{base}.scales": scales,
    }


def gptq(base: str, layer: Layer, version: int = 1) -> Arrays:
    stored = layer.zeros - 1 if version == 1 else layer.zeros
    return {
        f"{base}.qweight": pack(layer.values, layer.bits).T,
        f"{base}.qzeros": pack(stored.T, layer.bits),
        f"{base}.scales": layer.scales.T,
        f"{base}.g_idx": layer.group_of,
    }


def compressed(base: str, layer: Layer, is_symmetric: bool) -> Arrays:
    tensors: Arrays = {
        f"{base}.weight_packed": pack(layer.values, layer.bits),
        f"{base}.weight_scale": layer.scales,
        f"{base}.weight_shape": np.array(layer.values.shape, np.int64),
    }
    if not is_symmetric:
        tensors[f"{base}.weight_zero_point"] = pack(layer.zeros.T, layer.bits).T
    return tensors
