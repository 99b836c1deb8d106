"""What attention needs of every new token: queries rotated and rounded, keys and values in pages.

Queries end up as the tiles want them (`rounding_simd.query_bytes`, or float32 for `f32` pages).
Knows arrays only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from engine.kernels.compiled import compiled
from engine.kernels.rounding_simd import largest_magnitude, round_query
from engine.kv_format import BLOCK_SIZE, MAX_MAGNITUDE, MIN_SCALE


@compiled
def _rotate(x: Any, cos: Any, sin: Any, scale: Any, out: Any) -> None:
    half = cos.shape[0]
    for i in range(half):
        a, b = x[i], x[i + half]
        out[i] = (a * cos[i] - b * sin[i]) * scale
        out[i + half] = (b * cos[i] + a * sin[i]) * scale
    for i in range(2 * half, x.shape[0]):
        out[i] = x[i] * scale


@compiled
def _copy(source: Any, out: Any) -> None:
    """A loop: an assignment to a slice compiles in words for shapes that do not match."""
    for i in range(source.shape[0]):
        out[i] = source[i]


@compiled
def _clear_bad(x: Any) -> Any:
    """Zeros in place of what is not finite; the largest magnitude of the rest."""
    largest = np.float32(0)
    for d in range(x.shape[0]):
        if not abs(x[d]) < MAX_MAGNITUDE:
            x[d] = np.float32(0)
        largest = max(largest, abs(x[d]))
    return largest


@compiled
def _quantize(x: Any, max_level: Any, bias: Any, stored: Any, scales: Any) -> bool:
    """One head's vector as its page stores it, floats if `max_level` is 0; False if not finite."""
    finite = True
    group_size = x.shape[0] // scales.shape[0]
    half = group_size // 2
    for g in range(scales.shape[0]):
        group = x[g * group_size : (g + 1) * group_size]
        largest = largest_magnitude(group.ctypes.data, group_size)
        if not largest < MAX_MAGNITUDE:  # also when it is a NaN
            finite = False
            largest = _clear_bad(group)
        if max_level == 0:
            scales[g] = np.float32(1)
            _copy(x, stored)
            continue
        scale = largest / np.float32(max_level)
        inverse = np.float32(1) / scale if scale > MIN_SCALE else np.float32(0)
        scales[g] = scale
        if stored.shape[0] == x.shape[0]:
            for d in range(group_size):
                stored[g * group_size + d] = np.int32(np.rint(group[d] * inverse)) + bias
        else:
            for i in range(half):
                low = (np.int32(np.rint(group[i] * inverse)) + bias) & 15
                high = (np.int32(np.rint(group[i + half] * inverse)) + bias) & 15
                stored[g * half + i] = low | (high << 4)
    return finite


@compiled
def _place_key(stored: Any, keys: Any, token: int) -> None:
    """To one block and head: `keys` as in `PageFormat.key_shape`, whose lanes have four bytes."""
    lanes, places = stored.view(np.uint32), keys.view(np.uint32)
    for i in range(keys.shape[0]):
        places[i, token, 0] = lanes[i]


@compiled
def _place_value(stored: Any, values: Any, token: int) -> None:
    """To one block and head: `values` as in `PageFormat.value_shape`."""
    size, lane = values.shape[2], values.shape[3]
    row, column = token // lane, token % lane
    for i in range(values.shape[0]):
        for j in range(size):
            values[i, row, j, column] = stored[i * size + j]


class Row(NamedTuple):
    """Scratch for a head's vector: padded float32, and as pages of keys and of values store it."""

    floats: Any
    key: Any
    value: Any


@compiled
def _write(
    t: Any, qkv: Any, head_size: Any, position: Any, slot: Any, cos: Any, sin: Any, scale: Any,
    key_level: Any, value_level: Any, queries: Any, keys: Any, values: Any, key_scales: Any,
    value_scales: Any, row: Row,
) -> None:  # fmt: skip
    """Rotates token t's queries and keys, and writes its keys and values to their slot."""
    num_kv_heads, _, group, _ = queries.shape
    heads, x, key_bias = qkv[t].reshape(-1, head_size), row.floats, key_level + 1
    cosines, sines, num_groups = cos[position], sin[position], key_scales.shape[2]
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    one = np.float32(1)
    x[head_size:] = 0
    for h in range(num_kv_heads):
        for i in range(group):
            _rotate(heads[h * group + i], cosines, sines, scale, x)
            query = queries[h, t, i]
            if key_level == 0:
                _copy(x, query[: 4 * x.shape[0]].view(np.float32))
            else:
                round_query(x.ctypes.data, x.shape[0], num_groups, key_bias, query.ctypes.data)
        _rotate(heads[num_kv_heads * group + h], cosines, sines, one, x)
        finite = _quantize(x, key_level, key_bias, row.key, key_scales[block, h, :, offset])
        _place_key(row.key, keys[block, h], offset)
        _copy(heads[num_kv_heads * (group + 1) + h], x)
        finite &= _quantize(x, value_level, 0, row.value, value_scales[block, h, :, offset])
        _place_value(row.value, values[block, h], offset)
        if not finite:
            key_scales[block, h, :, offset] = np.nan


@compiled
def write_tokens(
    first: int, last: int, thread: int, key_level: int, value_level: int, head_size: int,
    positions: Any, slots: Any, queries: Any, scratch: Any, cos: Any, sin: Any, scale: Any,
    qkv: Any, keys: Any, values: Any, key_scales: Any, value_scales: Any,
) -> None:  # fmt: skip
    """Rotates tokens `first` to `last` - 1 and writes them, in the scratch memory of a thread.

    `scratch`: see `attention_kernel.Scratch`; `scale`: float32.
    """
    own, padded_size = scratch.weights[thread], scratch.places.shape[2] - 2
    key_size, value_size = keys.shape[2] * keys.shape[4], values.shape[2] * values.shape[4]
    row = Row(
        own[0, :padded_size], own[1].view(keys.dtype)[:key_size],
        own[2].view(values.dtype)[:value_size],
    )  # fmt: skip
    for t in range(first, last):
        _write(
            t, qkv, head_size, positions[t], slots[t], cos, sin, scale, key_level, value_level,
            queries, keys, values, key_scales, value_scales, row,
        )  # fmt: skip
