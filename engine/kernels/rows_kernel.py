"""Rows of matrices by index: the small copies at both ends of a step.

In numba because numpy's several calls a copy cost more than the copy when a step's weights have
just swept the caches. Knows arrays only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.compiled import compiled


@compiled
def copy_rows(source: Any, rows: Any, out: Any) -> None:
    """out[r] = source[rows[r]]; all two-dimensional."""
    for r in range(rows.shape[0]):
        for i in range(out.shape[1]):
            out[r, i] = source[rows[r], i]


@compiled
def unpack_rows(data: Any, scales: Any, zero_points: Any, bits: Any, rows: Any, out: Any) -> None:
    """out[r] = row rows[r] of a packed matrix (`export.packing.PackedMatrix`), float32.

    `zero_points` has no columns when all of them are the middle of the range.
    """
    zero = np.float32(1 << (bits - 1))
    for r in range(rows.shape[0]):
        for block in range(scales.shape[1]):
            packed, scale = data[rows[r], block], scales[rows[r], block]
            if zero_points.shape[1] > 0:
                if bits == 8:
                    zero = np.float32(zero_points[rows[r], block])
                else:
                    both = zero_points[rows[r], block // 2]
                    zero = np.float32((both >> (4 * (block % 2))) & 15)
            start = block * (packed.shape[0] * 8 // bits)
            size = min(packed.shape[0] * 8 // bits, out.shape[1] - start)
            if bits == 8:
                for i in range(size):
                    out[r, start + i] = (np.float32(packed[i]) - zero) * scale
            else:
                for i in range(size // 2):
                    low, high = packed[i] & 15, packed[i] >> 4
                    out[r, start + 2 * i] = (np.float32(low) - zero) * scale
                    out[r, start + 2 * i + 1] = (np.float32(high) - zero) * scale
                if size % 2 == 1:
                    last = np.float32(packed[size // 2] & 15)
                    out[r, start + size - 1] = (last - zero) * scale


@compiled
def first_row_beyond(x: Any, limit_bits: Any) -> Any:
    """The first row of float32 `x` [R, N] with a magnitude above the limit or a NaN, or -1.

    `limit_bits` is the limit's bit pattern: magnitudes order as their patterns do, and maxima of
    integers can be taken in any order, sixteen at a time.
    """
    magnitude = np.uint32(0x7FFFFFFF)
    for r in range(x.shape[0]):
        bits = x[r].view(np.uint32)
        largest = np.uint32(0)
        for i in range(bits.shape[0]):
            largest = max(largest, bits[i] & magnitude)
        if largest > limit_bits:
            return r
    return -1
