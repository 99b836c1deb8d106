"""One tile of attention behind an address: some query rows of a KV head against 128 keys.

Compiled for one KV format and two numbers of rows (those of a decode, and 8), and called through
a pointer: a compiler would otherwise take the code in wherever it is called from. `f32` pages are
worked on in floats (`simd.py`), all others in integers (`attention_products.py`,
`attention_simd.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types

from engine.kernels import attention_products, attention_simd, simd
from engine.kernels.attention_simd import (
    DECAY,
    SCALE,
    SHIFT,
    load_float,
    load_index,
    store_float,
)
from engine.kernels.compiled import compiled
from engine.kernels.simd import LANES, Emitter, intrinsic, result_of
from engine.kv_format import KVFormat
from engine.vector_sizes import INT4_GROUP_SIZE

MAX_TILE_ROWS = 8
_LOG2_E = np.float32(1.4426950408889634)

_NUM_INTEGERS = 23
_SIGNATURE = types.void(*[types.int64] * _NUM_INTEGERS, types.float32)
_VECTOR_BYTES = 4 * LANES


class AttentionTiles(NamedTuple):
    """The addresses of one KV format's tiles: of `few` rows, which are those of a decode, and of
    MAX_TILE_ROWS."""

    small: int
    few: int
    large: int


def open_tiles(kv_format: KVFormat, group: int) -> AttentionTiles:
    """Compiles them the first time, or loads them if kernels are cached (`kernel_cache.py`).

    `group`: query heads of a KV head.
    """
    folder, rows = vars(numba.config)["CACHE_DIR"], min(max(group, 1), MAX_TILE_ROWS)
    bits = kv_format.keys.bits, kv_format.values.bits
    small, large = (_compile(folder, each, *bits) for each in (rows, MAX_TILE_ROWS))
    return AttentionTiles(int(small.address), rows, int(large.address))


@cache
def _compile(folder: str, num_rows: int, key_bits: int, value_bits: int) -> Any:
    # The number of elements is what counts: it chooses the compiled code.
    rows, key_form, value_form = (0,) * num_rows, (0,) * key_bits, (0,) * value_bits
    tile = _float_tile(rows) if key_bits == 32 else _integer_tile(rows, key_form, value_form)
    return numba.cfunc(_SIGNATURE, cache=bool(folder))(tile)


@intrinsic
def run_tile(
    typing_context: Any, tile: Any, queries: Any, query_stride: Any, size: Any, keys: Any,
    values: Any, key_scales: Any, value_scales: Any, num_heads: Any, table: Any, first: Any,
    end: Any, num_left: Any, ahead: Any, next_table: Any, num_next: Any, next_heads: Any,
    seen: Any, group: Any, window: Any, weights: Any, weight_stride: Any, out: Any,
    out_stride: Any, softcap: Any,
) -> Any:  # fmt: skip
    """Calls the tile at an address that `open_tiles` returned.

    `queries`: the rows' first, as the write phase left it; `size`: of a padded head; `keys` …
    `value_scales`: of block 0 and the KV head in pages of `num_heads` heads; `table`: the int32
    numbers of the tile's blocks, `first` to `end` of which are worked on. Meanwhile, those `ahead`
    blocks further on are fetched: there are `num_left`, and then the `num_next` of `next_table` in
    the pages of `next_heads` heads further on. Row r sees the tile's keys before number
    (seen + r) // group, or the last `window` of those. `weights`: scratch for every row
    (`weight_floats`). `out`: each row's sums, largest score and sum of weights so far.
    """

    def emit(e: Emitter, arguments: Sequence[Any]) -> None:
        kinds = [ir.IntType(64)] * _NUM_INTEGERS + [ir.FloatType()]
        kind = ir.FunctionType(ir.VoidType(), kinds)
        e.b.call(e.b.inttoptr(arguments[0], kind.as_pointer()), list(arguments[1:]))

    return result_of(types.void(*[types.int64] * (1 + _NUM_INTEGERS), types.float32), emit)


def _float_tile(rows: tuple[int, ...]) -> Any:
    def tile(
        queries: int, query_stride: int, size: int, keys: int, values: int, key_scales: int,
        value_scales: int, num_heads: int, table: int, first: int, end: int, num_left: int,
        ahead: int, next_table: int, num_next: int, next_heads: int, seen: int, group: int,
        window: int, weights: int, weight_stride: int, out: int, out_stride: int, softcap: float,
    ) -> None:  # fmt: skip
        page_bytes, scale_bytes = num_heads * size * _VECTOR_BYTES, num_heads * _VECTOR_BYTES
        for b in range(first, end):
            block = load_index(table + 4 * b)
            simd.scores(
                rows, queries, query_stride, keys + block * page_bytes,
                key_scales + block * scale_bytes, size, weights + b * _VECTOR_BYTES, weight_stride,
            )  # fmt: skip
        for r in range(len(rows)):
            row, state = weights + r * weight_stride, out + r * out_stride
            if softcap > 0:
                simd.row_softcap(row + first * _VECTOR_BYTES, end - first, softcap)
            _mask(row, first * LANES, end * LANES, (seen + r) // group, window)
            before = load_float(state + 4 * size)
            largest = max(before, simd.row_max(row + first * _VECTOR_BYTES, end - first))
            shift = _shift(largest)
            decay = simd.exp(before - shift)
            total = simd.row_exp(row + first * _VECTOR_BYTES, end - first, shift)
            _keep(state + 4 * size, largest, decay, total)
            for d in range(size):
                store_float(state + 4 * d, load_float(state + 4 * d) * decay)
        for b in range(first, end):
            block = load_index(table + 4 * b)
            simd.weighted_sum(
                rows, weights + b * _VECTOR_BYTES, weight_stride, values + block * page_bytes,
                value_scales + block * scale_bytes, size, out, out_stride,
            )  # fmt: skip

    return tile


def _integer_tile(
    rows: tuple[int, ...], key_form: tuple[int, ...], value_form: tuple[int, ...]
) -> Any:
    def tile(
        queries: int, query_stride: int, size: int, keys: int, values: int, key_scales: int,
        value_scales: int, num_heads: int, table: int, first: int, end: int, num_left: int,
        ahead: int, next_table: int, num_next: int, next_heads: int, seen: int, group: int,
        window: int, weights: int, weight_stride: int, out: int, out_stride: int, softcap: float,
    ) -> None:  # fmt: skip
        key_groups, value_groups = _num_groups(key_form, size), _num_groups(value_form, size)
        head_bytes = size * LANES * len(key_form) // 8, size * LANES * len(value_form) // 8
        key_bytes, value_bytes = num_heads * head_bytes[0], num_heads * head_bytes[1]
        scale_bytes = num_heads * _VECTOR_BYTES
        for b in range(first, end, 2):
            block = load_index(table + 4 * b)
            other = load_index(table + 4 * min(b + 1, end - 1))
            later, heads = _later(b + ahead, table, num_left, next_table, num_next, next_heads)
            later_other, other_heads = _later(
                b + 1 + ahead, table, num_left, next_table, num_next, next_heads
            )
            attention_products.scores(
                rows, key_form, value_form, queries, query_stride, size,
                weights + b * _VECTOR_BYTES, weight_stride, keys + block * key_bytes,
                key_scales + block * key_groups * scale_bytes,
                keys + later * key_bytes + heads * head_bytes[0],
                values + later * value_bytes + heads * head_bytes[1],
                key_scales + (later * num_heads + heads) * key_groups * _VECTOR_BYTES,
                value_scales + (later * num_heads + heads) * value_groups * _VECTOR_BYTES,
                keys + other * key_bytes, key_scales + other * key_groups * scale_bytes,
                keys + later_other * key_bytes + other_heads * head_bytes[0],
                values + later_other * value_bytes + other_heads * head_bytes[1],
                key_scales + (later_other * num_heads + other_heads) * key_groups * _VECTOR_BYTES,
                value_scales
                + (later_other * num_heads + other_heads) * value_groups * _VECTOR_BYTES,
            )  # fmt: skip
        # Row by row in each loop: a processor works on several at once where none waits for itself.
        limit, head = seen // group, seen % group
        for r in range(len(rows)):
            row, state = weights + r * weight_stride, out + r * out_stride + 4 * size
            scale = load_float(queries + r * query_stride + 2 * size + 4 * key_groups)
            scale = _cap(row, first, end, scale, softcap)
            _mask(row, first * LANES, end * LANES, limit, window)
            _shift_row(row, first, end, scale, state)
            head += 1
            if head == group:
                limit, head = limit + 1, 0
        for r in range(len(rows)):
            row, total = weights + r * weight_stride, out + r * out_stride + 4 * size + 4
            sum_before = load_float(total) * load_float(row + DECAY)
            store_float(total, sum_before + attention_simd.row_exp2(row, first, end))
        for g in range(value_groups):
            scales = value_scales + g * _VECTOR_BYTES
            for r in range(len(rows)):
                attention_simd.scale_weights(
                    weights + r * weight_stride, first, end, scales, value_groups * scale_bytes,
                    table, g,
                )  # fmt: skip
            for r in range(len(rows)):
                attention_simd.pack_weights(
                    weights + r * weight_stride, first, end, scales, value_groups * scale_bytes,
                    table, g,
                )  # fmt: skip
        attention_products.weighted_sum(
            rows, value_form, weights, weight_stride, values, value_bytes, table, first, end, size,
            out, out_stride,
        )  # fmt: skip

    return tile


@compiled
def _later(
    at: int, table: int, num_left: int, next_table: int, num_next: int, next_heads: int
) -> tuple[int, int]:
    """The block in place `at`, and how many heads further on it is."""
    if at < num_left:
        return load_index(table + 4 * at), 0
    return load_index(next_table + 4 * min(at - num_left, num_next - 1)), next_heads


@compiled
def _num_groups(form: Any, size: int) -> int:
    return size // INT4_GROUP_SIZE if len(form) == 4 else 1


@compiled
def _mask(row: int, first: int, end: int, limit: int, window: int) -> None:
    """-inf for scores `first` to `end` of keys from `limit` on, and more than `window` before."""
    if window > 0:
        for k in range(first, min(limit - window, end)):
            store_float(row + 4 * k, np.float32(-np.inf))
    for k in range(max(limit, first), end):
        store_float(row + 4 * k, np.float32(-np.inf))


@compiled
def _shift(largest: Any) -> Any:
    """While a row has seen no key yet its largest score is -inf, and -inf - -inf is NaN."""
    return largest if largest > -np.inf else np.float32(0)


@compiled
def _keep(state: int, largest: Any, decay: Any, total: Any) -> None:
    """A row's largest score, and the sum of its weights."""
    store_float(state, largest)
    store_float(state + 4, load_float(state + 4) * decay + total)


@compiled
def _cap(row: int, first: int, end: int, scale: Any, softcap: Any) -> Any:
    """What the scores are still to be multiplied by, as powers of 2."""
    if not softcap > 0:
        return scale * _LOG2_E
    for k in range(first * LANES, end * LANES):
        store_float(row + 4 * k, load_float(row + 4 * k) * scale)
    simd.row_softcap(row + first * _VECTOR_BYTES, end - first, softcap)
    return _LOG2_E


@compiled
def _shift_row(row: int, first: int, end: int, scale: Any, state: int) -> None:
    """What makes weights of scores, relative to the largest one so far."""
    before = load_float(state)
    largest = max(before, attention_simd.row_maximum(row, first, end) * scale)
    shift = _shift(largest)
    store_float(state, largest)
    store_float(row + DECAY, attention_simd.exp2(before - shift))
    store_float(row + SCALE, scale)
    store_float(row + SHIFT, shift)
