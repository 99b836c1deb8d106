"""The numba form of paged attention: one call for small steps, one per thread for large ones.

Work is cut into units of (sequence, tile of query rows, KV head), dealt out in turn. Query rows are
(token, head of the group) pairs, token-major, so that the heads of a group share each page load and
decode and prefill are the same loop. Every unit reduces its rows in the same order whatever thread
runs it and whatever rows share its tile (`simd.py`), so neither changes a bit of the result.
Knows arrays only.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numba
import numpy as np

from engine.architectures.config import ModelConfig
from engine.attention import Attend, rope_table
from engine.batch import Batch, Float32Array
from engine.kernels import simd
from engine.kv_cache import LayerPages
from engine.kv_format import BLOCK_SIZE, MAX_MAGNITUDE, MIN_SCALE, KVFormat

TILE_BLOCKS = 8
TILE_KEYS = TILE_BLOCKS * BLOCK_SIZE
MAX_TILE_ROWS = 8
_CACHE_LINE_FLOATS = 16
# A fan-out costs about 0.1 ms, and a pair about 30 ns: below this, one thread is faster.
MIN_PARALLEL_PAIRS = 12_000
_compiled: Any = numba.njit(nogil=True, error_model="numpy")
_WRITE, _ATTEND = (True, False), (False, True)  # every page is written before any is read


@_compiled
def _rotate(x: Any, cos: Any, sin: Any, scale: Any, out: Any) -> None:
    half = cos.shape[0]
    for i in range(half):
        a, b = x[i], x[i + half]
        out[i] = (a * cos[i] - b * sin[i]) * scale
        out[i + half] = (b * cos[i] + a * sin[i]) * scale
    for i in range(2 * half, x.shape[0]):
        out[i] = x[i] * scale


@_compiled
def _copy(source: Any, out: Any) -> None:
    """A loop: an assignment to a slice compiles in words for shapes that do not match."""
    for i in range(source.shape[0]):
        out[i] = source[i]


@_compiled
def _store(x: Any, max_level: Any, stored: Any, scales: Any) -> bool:
    """One head's vector to its page, quantized unless `max_level` is 0; False if not finite."""
    finite = True
    group_size = x.shape[0] // scales.shape[0]
    half = group_size // 2
    for g in range(scales.shape[0]):
        group = x[g * group_size : (g + 1) * group_size]
        largest = np.float32(0)
        for d in range(group_size):
            if not abs(group[d]) < MAX_MAGNITUDE:  # also when it is a NaN
                finite = False
                group[d] = np.float32(0)
            largest = max(largest, abs(group[d]))
        if max_level == 0:
            scales[g] = np.float32(1)
            _copy(x, stored)
            continue
        scale = largest / np.float32(max_level)
        inverse = np.float32(1) / scale if scale > MIN_SCALE else np.float32(0)
        scales[g] = scale
        if stored.shape[0] == x.shape[0]:
            for d in range(group_size):
                stored[g * group_size + d] = np.int32(np.rint(group[d] * inverse))
        else:
            for i in range(half):
                low = np.int32(np.rint(group[i] * inverse)) + 8
                high = np.int32(np.rint(group[i + half] * inverse)) + 8
                stored[g * half + i] = low | (high << 4)
    return finite


@_compiled
def _write(
    t: Any, qkv: Any, head_size: Any, position: Any, slot: Any, cos: Any, sin: Any, scale: Any,
    key_level: Any, value_level: Any, queries: Any, keys: Any, values: Any, key_scales: Any,
    value_scales: Any, row: Any,
) -> None:  # fmt: skip
    """Rotates token t's queries and keys, and writes its keys and values to their slot."""
    num_kv_heads, _, group, padded_size = queries.shape
    heads = qkv[t].reshape(-1, head_size)
    row[head_size:] = 0
    for h in range(num_kv_heads * group):
        _rotate(heads[h], cos[position], sin[position], scale, queries[h // group, t, h % group])
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    one = np.float32(1)
    for h in range(num_kv_heads):
        _rotate(heads[num_kv_heads * group + h], cos[position], sin[position], one, row)
        finite = _store(row, key_level, keys[block, h, :, offset], key_scales[block, h, :, offset])
        _copy(heads[num_kv_heads * (group + 1) + h], row)
        finite &= _store(
            row, value_level, values[block, h, offset], value_scales[block, h, :, offset]
        )
        if not finite:
            key_scales[block, h, :, offset] = np.nan


@_compiled
def _mask(weights: Any, r: Any, first: Any, end: Any, lower: Any, limit: Any) -> None:
    """-inf for row r's scores `first` to `end` that are not within `lower` to `limit`."""
    for k in range(first, min(lower, end)):
        weights[r, k] = -np.inf
    for k in range(max(limit, first), end):
        weights[r, k] = -np.inf


@_compiled
def _tile(
    rows: Any, queries: Any, first_limit: Any, first_row: Any, visible: Any, group: Any,
    window: Any, softcap: Any, table: Any, head: Any, keys: Any, values: Any, key_scales: Any,
    value_scales: Any, weights: Any, sums: Any, maxima: Any, totals: Any,
) -> None:  # fmt: skip
    """A tile of query rows of one KV head over all keys that any of them may see.

    sums[r] / totals[r] is row r's attention. Tiles of keys lie at multiples of their size, and a
    key that a row may not see adds an exact zero to it: so neither the rows beside it nor the
    pages that are passed over change a bit.
    """
    padded_size = sums.shape[1]
    begin = max(first_limit + first_row // group - window, 0) if window > 0 else 0
    for r in range(len(rows)):
        maxima[r] = -np.inf
        totals[r] = 0
        sums[r, :] = 0
    for start in range(begin // TILE_KEYS * TILE_KEYS, visible, TILE_KEYS):
        num_blocks = min(TILE_BLOCKS, (visible - start + BLOCK_SIZE - 1) // BLOCK_SIZE)
        first_block = max(begin - start, 0) // BLOCK_SIZE
        for b in range(first_block, num_blocks):
            block = table[start // BLOCK_SIZE + b]
            simd.scores(
                rows, keys, queries.ctypes.data, queries.strides[0],
                keys[block, head].ctypes.data, key_scales[block, head].ctypes.data, padded_size,
                weights.ctypes.data + b * BLOCK_SIZE * 4, weights.strides[0],
            )  # fmt: skip
        for r in range(len(rows)):
            row = weights[r].ctypes.data + first_block * BLOCK_SIZE * 4
            num_vectors = num_blocks - first_block
            if softcap > 0:
                simd.row_softcap(row, num_vectors, softcap)
            limit = first_limit + (first_row + r) // group - start
            lower = limit - window if window > 0 else 0
            _mask(weights, r, first_block * BLOCK_SIZE, num_blocks * BLOCK_SIZE, lower, limit)
            largest = max(maxima[r], simd.row_max(row, num_vectors))
            # While a row has seen no key yet its largest score is -inf, and -inf - -inf is NaN.
            shift = largest if largest > -np.inf else np.float32(0)
            decay = simd.exp(maxima[r] - shift)
            totals[r] = totals[r] * decay + simd.row_exp(row, num_vectors, shift)
            maxima[r] = largest
            for d in range(padded_size):
                sums[r, d] *= decay
        for b in range(first_block, num_blocks):
            block = table[start // BLOCK_SIZE + b]
            simd.weighted_sum(
                rows, values, weights.ctypes.data + b * BLOCK_SIZE * 4, weights.strides[0],
                values[block, head].ctypes.data, value_scales[block, head].ctypes.data,
                padded_size, sums.ctypes.data, sums.strides[0],
            )  # fmt: skip


@_compiled
def attend_part(
    part: Any, num_parts: Any, rows: Any, head_size: Any, queries: Any, query_starts: Any,
    context_lens: Any, tables: Any, window: Any, softcap: Any, keys: Any, values: Any,
    key_scales: Any, value_scales: Any, out: Any, scratch: Any,
) -> None:  # fmt: skip
    num_rows = len(rows)
    num_kv_heads, max_tokens, group, padded_size = queries.shape
    rows_by_head = queries.reshape(num_kv_heads, max_tokens * group, padded_size)
    end = TILE_KEYS + padded_size
    weights, sums = scratch[:num_rows, :TILE_KEYS], scratch[:num_rows, TILE_KEYS:end]
    maxima, totals = scratch[:num_rows, end], scratch[:num_rows, end + 1]
    unit = 0
    for s in range(context_lens.shape[0]):
        first = query_starts[s] * group
        num_query_rows = query_starts[s + 1] * group - first
        first_limit = context_lens[s] - num_query_rows // group + 1
        for start in range(0, num_query_rows, num_rows):
            count = min(num_rows, num_query_rows - start)
            visible = first_limit + (start + count - 1) // group
            for head in range(num_kv_heads):
                unit += 1
                if unit % num_parts != part:
                    continue
                _tile(
                    rows, rows_by_head[head, first + start :], first_limit, start, visible, group,
                    window, softcap, tables[s], head, keys, values, key_scales, value_scales,
                    weights, sums, maxima, totals,
                )  # fmt: skip
                for r in range(count):
                    token = query_starts[s] + (start + r) // group
                    column = (head * group + (start + r) % group) * head_size
                    for d in range(head_size):
                        out[token, column + d] = sums[r, d] / totals[r]


@_compiled
def write_part(
    part: int, num_parts: int, key_level: int, value_level: int, head_size: int, positions: Any,
    slots: Any, queries: Any, scratch: Any, cos: Any, sin: Any, scale: Any, qkv: Any, keys: Any,
    values: Any, key_scales: Any, value_scales: Any,
) -> None:  # fmt: skip
    """The tokens to rotate and write that fall to one of `num_parts` parts. `scale`: float32."""
    row = scratch[part, 0, : queries.shape[3]]
    for t in range(part, positions.shape[0], num_parts):
        _write(
            t, qkv, head_size, positions[t], slots[t], cos, sin, scale, key_level, value_level,
            queries, keys, values, key_scales, value_scales, row,
        )  # fmt: skip


@_compiled
def run_part(
    part: int, num_parts: int, writes: bool, attends: bool, rows: Any, key_level: int,
    value_level: int, head_size: int, positions: Any, slots: Any, query_starts: Any,
    context_lens: Any, tables: Any, queries: Any, scratch: Any, cos: Any, sin: Any, scale: Any,
    window: int, softcap: Any, qkv: Any, keys: Any, values: Any, key_scales: Any,
    value_scales: Any, out: Any,
) -> None:  # fmt: skip
    """The tokens to write and the units to attend that fall to one of `num_parts` parts.

    `rows`: a tuple of as many elements as a tile has rows. `scale`, `softcap`: float32.
    """
    if writes:
        write_part(
            part, num_parts, key_level, value_level, head_size, positions, slots, queries, scratch,
            cos, sin, scale, qkv, keys, values, key_scales, value_scales,
        )  # fmt: skip
    if attends:
        attend_part(
            part, num_parts, rows, head_size, queries, query_starts, context_lens, tables,
            window, softcap, keys, values, key_scales, value_scales, out, scratch[part],
        )  # fmt: skip


class KernelAttention:
    """See `attention.Attention`. `max_tokens` bounds T; buffers are allocated once."""

    def __init__(
        self,
        config: ModelConfig,
        kv_format: KVFormat,
        max_model_len: int,
        max_tokens: int,
        num_threads: int,
    ) -> None:
        group = config.num_heads // config.num_kv_heads
        self._num_threads = num_threads
        self._helpers = ThreadPoolExecutor(max(1, num_threads - 1), "attention")
        self._layers = layer_arguments(config, max_model_len)
        self._queries, self._scratch = make_buffers(config, kv_format, max_tokens, num_threads)
        # The number of elements is what counts: it chooses the compiled form.
        self._decode_rows = (0,) * min(group, MAX_TILE_ROWS)
        self._prefill_rows = (0,) * MAX_TILE_ROWS
        self._sizes = (kv_format.keys.max_level, kv_format.values.max_level, config.head_size)

    def begin(self, batch: Batch) -> Attend:
        is_decode = batch.num_tokens == batch.num_sequences
        step = (
            self._decode_rows if is_decode else self._prefill_rows, *self._sizes,
            batch.positions, batch.slot_mapping, batch.query_starts, batch.context_lens,
            batch.block_tables, self._queries, self._scratch,
        )  # fmt: skip
        if self._num_threads == 1 or num_pairs(batch) < MIN_PARALLEL_PAIRS:
            return partial(self._alone, step)
        return partial(self._on_all_threads, step)

    def _on_all_threads(
        self, step: tuple[Any, ...], qkv: Float32Array, pages: LayerPages, out: Float32Array
    ) -> None:
        arguments = (*step, *self._layers[pages.layer], qkv, *pages.arrays, out)
        for phase in (_WRITE, _ATTEND):
            others = [
                self._helpers.submit(run_part, part, self._num_threads, *phase, *arguments)
                for part in range(1, self._num_threads)
            ]
            run_part(0, self._num_threads, *phase, *arguments)
            for other in others:
                other.result()

    def _alone(
        self, step: tuple[Any, ...], qkv: Float32Array, pages: LayerPages, out: Float32Array
    ) -> None:
        layer = self._layers[pages.layer]
        run_part(0, 1, True, True, *step, *layer, qkv, *pages.arrays, out)


def make_buffers(
    config: ModelConfig, kv_format: KVFormat, max_tokens: int, num_threads: int
) -> tuple[Float32Array, Float32Array]:
    """(`queries` [KV, tokens, group, padded head size], `scratch` of every thread)."""
    padded_size = kv_format.padded_size(config.head_size)
    group = config.num_heads // config.num_kv_heads
    # A tile may read past the last row: room for one more. What pads a head stays zero.
    tokens = max_tokens + MAX_TILE_ROWS
    width = TILE_KEYS + padded_size + 2
    width += -width % _CACHE_LINE_FLOATS
    return (
        np.zeros((config.num_kv_heads, tokens, group, padded_size), np.float32),
        np.zeros((num_threads, MAX_TILE_ROWS, width), np.float32),
    )


def layer_arguments(config: ModelConfig, max_model_len: int) -> list[tuple[Any, ...]]:
    """Each layer's (cos, sin, scale, window, softcap), as `run_part` takes them."""
    tables = [rope_table(rope, max_model_len) for rope in config.ropes]
    scale, softcap = np.float32(config.attention_scale), np.float32(config.attention_softcap)
    return [(*tables[layer.rope], scale, layer.window, softcap) for layer in config.layers]


def num_pairs(batch: Batch) -> int:
    """(query, key) pairs of the step, at most: the size of one layer's attention."""
    if batch.num_tokens == batch.num_sequences:
        return int(batch.context_lens.sum())
    return int(np.dot(np.diff(batch.query_starts), batch.context_lens))
