"""Earlier keys and values of many sequences, from their pages into one dense window.

For graphs that have the attention inside and know nothing of pages. Knows arrays only.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.simd import INT4_GROUP_SIZE
from engine.kv_format import BLOCK_SIZE

_compiled: Any = numba.njit(nogil=True)


@_compiled
def _level(stored: Any, d: Any, bits: Any) -> Any:
    """Element d of a head's stored vector, before its scale."""
    if bits != 4:
        return np.float32(stored[d])
    half = INT4_GROUP_SIZE // 2
    group, i = d // INT4_GROUP_SIZE, d % INT4_GROUP_SIZE
    both = np.int32(stored[group * half + i % half])
    nibble = both & 15 if i < half else both >> 4
    return np.float32(nibble - 8)


@_compiled
def _is_bad(key_scales: Any, value_scales: Any, offset: Any) -> Any:
    total = np.float32(0)
    for g in range(key_scales.shape[0]):
        total += key_scales[g, offset] * np.float32(0)
    for g in range(value_scales.shape[0]):
        total += value_scales[g, offset] * np.float32(0)
    return not np.isfinite(total)


@_compiled
def _gather_block(
    count: Any, key_bits: Any, value_bits: Any, keys: Any, values: Any, key_scales: Any,
    value_scales: Any, out_keys: Any, out_values: Any,
) -> Any:  # fmt: skip
    """`count` tokens of one head's page. Zeros and True for a token that is not finite."""
    head_size = out_keys.shape[0]
    key_group = -(-keys.shape[0] * (2 if key_bits == 4 else 1) // key_scales.shape[0])
    value_group = -(-values.shape[1] * (2 if value_bits == 4 else 1) // value_scales.shape[0])
    is_bad = False
    for d in range(head_size):
        for t in range(count):
            scale = key_scales[d // key_group, t]
            out_keys[d, t] = _level(keys[:, t], d, key_bits) * scale
    for t in range(count):
        for d in range(head_size):
            scale = value_scales[d // value_group, t]
            out_values[t, d] = _level(values[t], d, value_bits) * scale
        if _is_bad(key_scales, value_scales, t):
            is_bad = True
            out_keys[:, t] = 0
            out_values[t] = 0
    return is_bad


@_compiled
def gather_window(
    tables: Any, num_past: Any, key_bits: Any, value_bits: Any, keys: Any, values: Any,
    key_scales: Any, value_scales: Any, out_keys: Any, out_values: Any, is_lost: Any,
) -> None:  # fmt: skip
    """The first `num_past[s]` tokens of every sequence, side by side.

    `tables` [S, B]; `keys` … as in `kv_cache.LayerPages`. `out_keys` [KV, D, W], `out_values`
    [KV, W, D] float32; what lies behind the last token is left as it is. A token whose key or value
    is not finite becomes zeros, and `is_lost[s]` True.
    """
    column = 0
    for s in range(num_past.shape[0]):
        for start in range(0, num_past[s], BLOCK_SIZE):
            count = min(BLOCK_SIZE, num_past[s] - start)
            block = tables[s, start // BLOCK_SIZE]
            for h in range(out_keys.shape[0]):
                is_lost[s] |= _gather_block(
                    count, key_bits, value_bits, keys[block, h], values[block, h],
                    key_scales[block, h], value_scales[block, h],
                    out_keys[h, :, column : column + count],
                    out_values[h, column : column + count],
                )  # fmt: skip
            column += count
