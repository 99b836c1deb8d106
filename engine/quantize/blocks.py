"""Float matrices to integer blocks: for every block the scale and zero that lose least.

What is lost is the squared error of the weights, or, when the Gram matrix of the inputs is known,
that of the outputs. Plain rounding is one of the candidates, so the result is never worse than it.
Weights are rounded to each candidate range, the scale is fitted to the levels that came out by
least squares, and the best of all rounded to once more (llama.cpp's block searches do the same; the
clipping of outliers by measured output error is that of AWQ, Lin et al. 2023).
Knows arrays only: no tensors' names, no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.export.packing import PackedMatrix, half_scales

Float32Array = NDArray[np.float32]

BLOCK_SIZES = (32, 64, 128)
_CHUNK_WEIGHTS = 1 << 19
"""Weights that one thread works on at a time; a dozen arrays of this many floats are alive."""

_SMALL_PRODUCT = 1 << 18
"""BLAS spreads larger products over threads of its own, which costs more than it gives here."""

_TINY = np.float32(1e-30)
# Where the largest magnitude of a symmetric block goes, in levels from zero: to the end of the
# range or beyond it, which clips it. Negative: to the negative side, which has one level more.
_SYMMETRIC_PEAKS = {4: (7.0, 7.5, -7.5, -8.0, -8.5, -9.0, -9.5, -10.0, -11.0, -12.0), 8: (-128.0,)}
# How far the range of an asymmetric block is shrunk, and where its zero moves, in levels.
_SHRINKS = {4: (1.0, 0.95, 0.9, 0.85, 0.8, 0.72, 0.64), 8: (1.0,)}
_ZERO_SHIFTS = {4: (0.0, -0.5, 0.5), 8: (0.0,)}


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`bits` 4 or 8. Symmetric blocks have no zero points: their zero is 2 ** (bits - 1)."""

    bits: int
    block_size: int
    is_symmetric: bool

    @property
    def max_level(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def bits_per_weight(self) -> float:
        """With scales (float32) and zero points."""
        zero_bits = 0 if self.is_symmetric else self.bits
        return self.bits + (32 + zero_bits) / self.block_size


@dataclass(frozen=True, slots=True)
class _Levels:
    """`q` [B, N, size], `scales` and `zeros` [B, N, 1]; all float32, q and zeros whole numbers."""

    q: Float32Array
    scales: Float32Array
    zeros: Float32Array

    def values(self) -> Float32Array:
        return (self.q - self.zeros) * self.scales


def round_plainly(weights: Float32Array, block_format: BlockFormat) -> PackedMatrix:
    """[N, K] float32 → blocks whose range is just that of their weights."""
    levels = _plain(_as_blocks(weights, block_format), block_format)
    return _pack(levels, block_format, weights.shape[1])


def plain_values(weights: Float32Array, block_format: BlockFormat) -> Float32Array:
    """[N, K]: what `round_plainly` makes of the weights, as floats again."""
    values = _plain(_as_blocks(weights, block_format), block_format).values()
    return values.swapaxes(0, 1).reshape(len(weights), -1)[:, : weights.shape[1]]


def quantize(
    weights: Float32Array,
    block_format: BlockFormat,
    grams: Float32Array | None = None,
    num_threads: int = 1,
) -> PackedMatrix:
    """[N, K] float32 → the blocks with the least error among all candidate ranges.

    `grams` [blocks, size, size] are those of `block_grams`; without them all inputs count alike.
    The result does not depend on `num_threads`.
    """
    num_cols = weights.shape[1]
    num_rows = max(1, min(_CHUNK_WEIGHTS // num_cols, _SMALL_PRODUCT // block_format.block_size**2))
    chunks = [weights[i : i + num_rows] for i in range(0, len(weights), num_rows)]

    def search(chunk: Float32Array) -> PackedMatrix:
        levels = _search(_as_blocks(chunk, block_format), block_format, grams)
        return _pack(levels, block_format, num_cols)

    with ThreadPoolExecutor(num_threads) as pool:
        return join(list(pool.map(search, chunks)))


def block_grams(inputs: Float32Array, block_size: int) -> Float32Array:
    """[T, K] → [blocks, size, size]: each block's mean of x xᵀ over the tokens."""
    blocks = _padded(inputs, block_size).reshape(len(inputs), -1, block_size).swapaxes(0, 1)
    grams: Float32Array = np.matmul(blocks.swapaxes(1, 2), blocks) / np.float32(len(inputs))
    return grams


def _search(blocks: Float32Array, block_format: BlockFormat, grams: Float32Array | None) -> _Levels:
    fitted = _best_fit(blocks, block_format, grams)
    rounded = _rounded(blocks, fitted.scales, fitted.zeros, block_format)
    best = _plain(blocks, block_format)
    least = _errors(best.values() - blocks, grams)
    for levels in (fitted, rounded):
        errors = _errors(levels.values() - blocks, grams)
        best = _where(errors < least, levels, best)
        least = np.minimum(errors, least)
    return best


def _best_fit(
    blocks: Float32Array, block_format: BlockFormat, grams: Float32Array | None
) -> _Levels:
    """The candidate whose levels, times the scale that fits them best, come closest.

    With levels c (less their zero) the best scale is cᵀGw / cᵀGc, and the error falls by
    (cᵀGw)² / cᵀGc: the larger that is, the better.
    """
    best: _Levels | None = None
    largest = np.zeros(0, np.float32)
    for levels in _candidates(blocks, block_format):
        centred = levels.q - levels.zeros
        weighted = _times(centred, grams)
        norm = np.einsum("bnk,bnk->bn", weighted, centred)
        product = np.einsum("bnk,bnk->bn", weighted, blocks)
        scales = half_scales(np.divide(product, norm, out=np.zeros_like(norm), where=norm > _TINY))
        gain = product * scales
        levels = _Levels(levels.q, scales[:, :, None], levels.zeros)
        best = levels if best is None else _where(gain > largest, levels, best)
        largest = gain if len(largest) == 0 else np.maximum(gain, largest)
    assert best is not None
    return best


def _where(mask: NDArray[np.bool_], chosen: _Levels, other: _Levels) -> _Levels:
    """Block by block; `mask` [B, N]."""
    wide = mask[:, :, None]
    return _Levels(
        np.where(wide, chosen.q, other.q),
        np.where(wide, chosen.scales, other.scales),
        np.where(wide, chosen.zeros, other.zeros),
    )


def _candidates(blocks: Float32Array, block_format: BlockFormat) -> Iterator[_Levels]:
    """Levels over the candidate ranges of every block."""
    if block_format.is_symmetric:
        extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2, keepdims=True), axis=2)
        middle = np.full_like(extreme, block_format.middle)
        for peak in _SYMMETRIC_PEAKS[block_format.bits]:
            yield _rounded(blocks, half_scales(extreme / np.float32(peak)), middle, block_format)
        return
    low, high = _range(blocks)
    for shrink in _SHRINKS[block_format.bits]:
        scales = half_scales((high - low) * np.float32(shrink / block_format.max_level))
        centre = -(high + low) * np.float32(0.5) * _inverse(scales)
        for shift in _ZERO_SHIFTS[block_format.bits]:
            offset = np.float32(block_format.max_level / 2 + shift)
            zeros = np.clip(np.rint(centre + offset), 0, block_format.max_level)
            yield _rounded(blocks, scales, zeros, block_format)


def _plain(blocks: Float32Array, block_format: BlockFormat) -> _Levels:
    if block_format.is_symmetric:
        largest = np.abs(blocks).max(axis=2, keepdims=True)
        scales = half_scales(largest / np.float32(block_format.middle - 1))
        return _rounded(blocks, scales, np.full_like(scales, block_format.middle), block_format)
    low, high = _range(blocks)
    scales = half_scales((high - low) / np.float32(block_format.max_level))
    zeros = np.clip(np.rint(-low * _inverse(scales)), 0, block_format.max_level)
    return _rounded(blocks, scales, zeros, block_format)


def _range(blocks: Float32Array) -> tuple[Float32Array, Float32Array]:
    """Least and largest value of each block [B, N, 1], zero included."""
    zero = np.float32(0)
    low = np.minimum(blocks.min(axis=2, keepdims=True), zero)
    return low, np.maximum(blocks.max(axis=2, keepdims=True), zero)


def _rounded(
    blocks: Float32Array, scales: Float32Array, zeros: Float32Array, block_format: BlockFormat
) -> _Levels:
    q = np.rint(blocks * _inverse(scales) + zeros)
    return _Levels(np.clip(q, 0, block_format.max_level), scales, zeros)


def _inverse(scales: Float32Array) -> Float32Array:
    """1 / scale, and 0 where a block is all zeros."""
    return np.divide(1, scales, out=np.zeros_like(scales), where=np.abs(scales) > _TINY)


def _errors(difference: Float32Array, grams: Float32Array | None) -> Float32Array:
    """[B, N]: dᵀ G d of each block, or dᵀ d."""
    errors: Float32Array = np.einsum("bnk,bnk->bn", _times(difference, grams), difference)
    return errors


def _times(vectors: Float32Array, grams: Float32Array | None) -> Float32Array:
    """[B, N, size] @ [B, size, size], block by block; the vectors themselves without `grams`."""
    return vectors if grams is None else np.matmul(vectors, grams)


def _as_blocks(weights: Float32Array, block_format: BlockFormat) -> Float32Array:
    """[N, K] → [B, N, size]: block-major, so that the products with `grams` are contiguous."""
    size = block_format.block_size
    blocks = _padded(weights, size).reshape(len(weights), -1, size)
    return np.ascontiguousarray(blocks.swapaxes(0, 1))


def _padded(x: Float32Array, multiple: int) -> Float32Array:
    """[N, K] with zeros behind, up to a multiple."""
    missing = -x.shape[1] % multiple
    return np.pad(x, ((0, 0), (0, missing))) if missing else x


def _pack(levels: _Levels, block_format: BlockFormat, num_cols: int) -> PackedMatrix:
    q = levels.q.astype(np.uint8).swapaxes(0, 1)  # [N, B, size]
    zeros = levels.zeros[:, :, 0].astype(np.uint8).T
    is_narrow = block_format.bits == 4
    return PackedMatrix(
        bits=block_format.bits,
        data=_nibbles(q) if is_narrow else np.ascontiguousarray(q),
        scales=np.ascontiguousarray(levels.scales[:, :, 0].T),
        block_size=block_format.block_size,
        zero_points=None if block_format.is_symmetric else _nibbles(zeros) if is_narrow else zeros,
        columns=num_cols if num_cols % block_format.block_size else None,
    )


def _nibbles(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two along the last axis in one byte, the first in the low half; an odd one is padded."""
    if q.shape[-1] % 2:
        q = np.concatenate([q, np.zeros_like(q[..., :1])], axis=-1)
    return q[..., 0::2] | (q[..., 1::2] << np.uint8(4))


def join(parts: Sequence[PackedMatrix]) -> PackedMatrix:
    """Matrices of one format and the same inputs, stacked along their rows."""
    zeros = [part.zero_points for part in parts if part.zero_points is not None]
    scales = [part.scales for part in parts if part.scales is not None]
    return PackedMatrix(
        bits=parts[0].bits,
        data=np.concatenate([part.data for part in parts]),
        scales=np.concatenate(scales),
        block_size=parts[0].block_size,
        zero_points=np.concatenate(zeros) if zeros else None,
        columns=parts[0].columns,
    )
