"""Rows of matrices by index: the small copies at both ends of a step.

In numba because numpy's several calls a copy cost more than the copy when a step's weights have
just swept the caches. Knows arrays only.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

_compiled: Any = numba.njit(nogil=True)


@_compiled
def copy_rows(source: Any, rows: Any, out: Any) -> None:
    """out[r] = source[rows[r]]; all two-dimensional."""
    for r in range(rows.shape[0]):
        for i in range(out.shape[1]):
            out[r, i] = source[rows[r], i]


@_compiled
def unpack_rows(data: Any, scales: Any, bits: Any, rows: Any, out: Any) -> None:
    """out[r] = row rows[r] of a packed matrix (`export.packing.PackedMatrix`), float32."""
    zero_point = np.float32(1 << (bits - 1))
    for r in range(rows.shape[0]):
        for block in range(scales.shape[1]):
            packed, scale = data[rows[r], block], scales[rows[r], block]
            start = block * (packed.shape[0] * 8 // bits)
            if bits == 8:
                for i in range(packed.shape[0]):
                    out[r, start + i] = (np.float32(packed[i]) - zero_point) * scale
            else:
                for i in range(packed.shape[0]):
                    low, high = packed[i] & 15, packed[i] >> 4
                    out[r, start + 2 * i] = (np.float32(low) - zero_point) * scale
                    out[r, start + 2 * i + 1] = (np.float32(high) - zero_point) * scale
