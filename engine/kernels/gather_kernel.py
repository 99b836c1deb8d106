"""Earlier keys and values of many sequences, from their pages into one dense window.

For graphs that have the attention inside and know nothing of pages. Knows arrays only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.compiled import compiled
from engine.kv_format import BLOCK_SIZE
from engine.vector_sizes import INT4_GROUP_SIZE

_HALF = INT4_GROUP_SIZE // 2


@compiled
def _place(d: Any, bits: Any) -> Any:
    """Which stored element holds element d of a head's vector."""
    if bits != 4:
        return d
    return d // INT4_GROUP_SIZE * _HALF + d % _HALF


@compiled
def _level(stored: Any, d: Any, bits: Any, bias: Any) -> Any:
    """Element d, before its scale, from the stored element that holds it."""
    if bits != 4:
        return np.float32(stored) - np.float32(bias)
    both = np.int32(stored)
    nibble = both & 15 if d % INT4_GROUP_SIZE < _HALF else both >> 4
    return np.float32(((nibble + 8 - bias) & 15) - 8)


@compiled
def _is_bad(key_scales: Any, value_scales: Any, offset: Any) -> Any:
    total = np.float32(0)
    for g in range(key_scales.shape[0]):
        total += key_scales[g, offset] * np.float32(0)
    for g in range(value_scales.shape[0]):
        total += value_scales[g, offset] * np.float32(0)
    return not np.isfinite(total)


@compiled
def _gather_block(
    count: Any, key_form: Any, value_form: Any, keys: Any, values: Any, key_scales: Any,
    value_scales: Any, out_keys: Any, out_values: Any,
) -> Any:  # fmt: skip
    """`count` tokens of one head's page. Zeros and True for a token that is not finite."""
    head_size = out_keys.shape[0]
    key_group = INT4_GROUP_SIZE if key_form[0] == 4 else head_size
    value_group = INT4_GROUP_SIZE if value_form[0] == 4 else head_size
    key_lane, value_lane, size = keys.shape[2], values.shape[3], values.shape[2]
    is_bad = False
    for d in range(head_size):
        i = _place(d, key_form[0])
        for t in range(count):
            level = _level(keys[i // key_lane, t, i % key_lane], d, *key_form)
            out_keys[d, t] = level * key_scales[d // key_group, t]
    for t in range(count):
        row, column = t // value_lane, t % value_lane
        for d in range(head_size):
            i = _place(d, value_form[0])
            level = _level(values[i // size, row, i % size, column], d, *value_form)
            out_values[t, d] = level * value_scales[d // value_group, t]
        if _is_bad(key_scales, value_scales, t):
            is_bad = True
            out_keys[:, t] = 0
            out_values[t] = 0
    return is_bad


@compiled
def gather_window(
    tables: Any, num_past: Any, key_form: Any, value_form: Any, keys: Any, values: Any,
    key_scales: Any, value_scales: Any, out_keys: Any, out_values: Any, is_lost: Any,
) -> None:  # fmt: skip
    """The first `num_past[s]` tokens of every sequence, side by side.

    `tables` [S, B]; the forms are each (bits, bias) of a `PageFormat`; `keys` … as in
    `kv_cache.LayerPages`. `out_keys` [KV, D, W], `out_values` [KV, W, D] float32; what lies behind
    the last token is left as it is. A token whose key or value is not finite becomes zeros, and
    `is_lost[s]` True.
    """
    column = 0
    for s in range(num_past.shape[0]):
        for start in range(0, num_past[s], BLOCK_SIZE):
            count = min(BLOCK_SIZE, num_past[s] - start)
            block = tables[s, start // BLOCK_SIZE]
            for h in range(out_keys.shape[0]):
                is_lost[s] |= _gather_block(
                    count, key_form, value_form, keys[block, h], values[block, h],
                    key_scales[block, h], value_scales[block, h],
                    out_keys[h, :, column : column + count],
                    out_values[h, column : column + count],
                )  # fmt: skip
            column += count
