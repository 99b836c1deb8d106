"""The numba form of paged attention: one call for small steps, one per thread for large ones.

Work is cut into units of (sequence, tile of query rows, KV head), which threads take in turn
(`attention_items.py`). Query rows are (token, head of the group) pairs, token-major, so that the
heads of a group share each page load and decode and prefill are the same loop. A unit's keys are
summed up in spans of 512, whose results are merged from the first to the last; where there are few
units, as in a decode of one long context, threads take spans in turn. Spans begin at multiples of
their size and every row is reduced in the same order whatever thread runs it and whatever rows
share its tile (`attention_tiles.py`), so none of this changes a bit of the result. Pages lie
anywhere in memory, so those of a thread's next item are fetched while it works on this one. Knows
arrays only.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.architectures.config import ModelConfig
from engine.attention import Attend, rope_table
from engine.batch import Batch, Float32Array
from engine.kernels import attention_simd, simd
from engine.kernels.attention_items import (
    MAX_SHARED_SPANS,
    SHARED_UNITS_PER_THREAD,
    Tile,
    Work,
    bounds_of,
    num_shared_spans,
    num_units_of,
    span_item,
    unit_of,
)
from engine.kernels.attention_simd import weight_floats
from engine.kernels.attention_tiles import MAX_TILE_ROWS, open_tiles, run_tile
from engine.kernels.compiled import compiled
from engine.kernels.page_write_kernel import write_tokens
from engine.kernels.rounding_simd import query_bytes
from engine.kernels.thread_team import COUNTER_BYTES, Turns, fetch_add, next_item, num_chunks
from engine.kv_cache import LayerPages
from engine.kv_format import BLOCK_SIZE, KVFormat
from engine.vector_sizes import SPAN_KEYS, TILE_KEYS

_TILE_BLOCKS = TILE_KEYS // BLOCK_SIZE
BLOCKS_AHEAD = 16
"""So many blocks before they are read pages are fetched, or all of the next span if it is less."""

_CACHE_LINE = 64
# A fan-out costs about 0.1 ms, and a pair about 30 ns: below this, one thread is faster.
MIN_PARALLEL_PAIRS = 12_000
_WRITE, _ATTEND = (True, False), (False, True)  # every page is written before any is read


class Next(NamedTuple):
    """What is read after a span: the address of its block numbers, how many there are, and how many
    heads further on in the pages."""

    table: int
    num_blocks: int
    heads: int


class Scratch(NamedTuple):
    """`weights` [threads, MAX_TILE_ROWS, floats], a row of which also holds a padded head; `sums`
    [threads, 2, MAX_TILE_ROWS, padded head size + 2]: a merged result and a partial one; `places`
    [spans, MAX_TILE_ROWS, the same]: partial results of spans that several threads share; `done`
    [units, a cache line] int64: how many of a unit's spans are there, 0 between layers."""

    weights: Any
    sums: Any
    places: Any
    done: Any


@compiled
def _next(work: Work, tile: Tile, span: int, heads: int) -> Next:
    start, end = bounds_of(tile, span)
    table = work.tables[tile.s, start // BLOCK_SIZE :].ctypes.data
    return Next(table, num_chunks(end - start, BLOCK_SIZE), heads)


@compiled
def _attend_span(
    work: Work, tile: Tile, head: int, span: int, following: Next, weights: Any, out: Any
) -> None:
    """A tile's query rows of one KV head over the keys of one span.

    out[r] is row r's sum of weighted values, its largest score and its sum of weights. Tiles of
    keys lie at multiples of their size, and a key that a row may not see adds an exact zero to it:
    so neither the rows beside it nor the pages that are passed over change a bit.
    """
    queries = work.queries[head, work.query_starts[tile.s] * work.group + tile.start :]
    _clear(out, tile.code_rows)
    first, end = bounds_of(tile, span)
    ahead = min(BLOCKS_AHEAD, num_chunks(end - first, BLOCK_SIZE))
    for start in range(first, end, TILE_KEYS):
        run_tile(
            tile.code, queries.ctypes.data, queries.strides[0], out.shape[1] - 2,
            work.keys[0, head].ctypes.data, work.values[0, head].ctypes.data,
            work.key_scales[0, head].ctypes.data, work.value_scales[0, head].ctypes.data,
            work.keys.shape[1], work.tables[tile.s, start // BLOCK_SIZE :].ctypes.data,
            max(tile.begin - start, 0) // BLOCK_SIZE,
            min(_TILE_BLOCKS, num_chunks(end - start, BLOCK_SIZE)),
            num_chunks(end - start, BLOCK_SIZE), ahead, following.table, following.num_blocks,
            following.heads,
            (tile.first_limit - start) * work.group + tile.start, work.group, work.window,
            weights.ctypes.data, weights.strides[0], out.ctypes.data, out.strides[0], work.softcap,
        )  # fmt: skip


@compiled
def _clear(out: Any, num_rows: int) -> None:
    """As if no key had been seen."""
    for r in range(num_rows):
        for d in range(out.shape[1]):
            out[r, d] = 0
        out[r, out.shape[1] - 2] = -np.inf


@compiled
def _power(work: Work, x: Any) -> Any:
    """Of what the largest scores are exponents of."""
    return attention_simd.exp2(x) if work.is_quantized else simd.exp(x)


@compiled
def _merge(work: Work, tile: Tile, later: Any, out: Any) -> None:
    """Adds what `_attend_span` made of later keys to what it made of the ones before them.

    A span of which a row sees nothing changes nothing, to the bit.
    """
    padded_size = out.shape[1] - 2
    for r in range(tile.num_rows):
        before, after = out[r, padded_size], later[r, padded_size]
        largest = max(before, after)
        shift = largest if largest > -np.inf else np.float32(0)
        kept, added = _power(work, before - shift), _power(work, after - shift)
        for d in range(padded_size):
            out[r, d] = out[r, d] * kept + later[r, d] * added
        total = padded_size + 1
        out[r, padded_size], out[r, total] = largest, out[r, total] * kept + later[r, total] * added


@compiled
def _finish(work: Work, tile: Tile, head: int, merged: Any) -> None:
    size, total = work.head_size, merged.shape[1] - 1
    token, i = work.query_starts[tile.s] + tile.start // work.group, tile.start % work.group
    for r in range(tile.num_rows):
        out = work.out[token, (head * work.group + i) * size :]
        weight = merged[r, total]
        for d in range(size):
            out[d] = merged[r, d] / weight
        i += 1
        if i == work.group:
            token, i = token + 1, 0


@compiled
def _attend_units(
    work: Work, turns: Turns, weights: Any, merged: Any, partial: Any
) -> tuple[int, int]:
    """The units that this thread comes to take, all spans of each: so many of how many."""
    num_units, num_done = num_units_of(work), 0
    item = next_item(turns, 0, num_units)
    while item.number >= 0:
        unit = unit_of(work, item.number)
        tile, head = unit.tile, unit.head
        after = unit_of(work, min(item.number + 1, num_units - 1))
        for span in range(tile.num_spans):
            if span + 1 < tile.num_spans:
                following = _next(work, tile, span + 1, 0)
            else:
                following = _next(work, after.tile, 0, after.head - head)
            if span == 0:
                _attend_span(work, tile, head, span, following, weights, merged)
            else:
                _attend_span(work, tile, head, span, following, weights, partial)
                _merge(work, tile, partial, merged)
        _finish(work, tile, head, merged)
        num_done += 1
        item = next_item(turns, item.stretch, num_units)
    return num_done, num_units


@compiled
def _attend_spans(
    work: Work, num_spans: int, turns: Turns, weights: Any, scratch: Scratch, merged: Any
) -> tuple[int, int]:
    """The spans that this thread comes to take; who brings a unit's last one merges them all."""
    num_heads, num_done = work.queries.shape[0], 0
    item = next_item(turns, 0, num_spans)
    while item.number >= 0:
        mine = span_item(work, item.number)
        after = span_item(work, min(item.number + 1, num_spans - 1))
        tile = mine.tile
        following = _next(work, after.tile, after.span, after.head - mine.head)
        _attend_span(
            work, tile, mine.head, mine.span, following, weights, scratch.places[item.number]
        )
        done = scratch.done[mine.unit]
        if fetch_add(done.ctypes.data, 1) == tile.num_spans - 1:
            done[0] = 0
            _clear(merged, tile.num_rows)
            for span in range(tile.num_spans):
                _merge(work, tile, scratch.places[mine.place + num_heads * span], merged)
            _finish(work, tile, mine.head, merged)
        num_done += 1
        item = next_item(turns, item.stretch, num_spans)
    return num_done, num_spans


@compiled
def make_work(
    tiles: Any, key_level: int, head_size: int, window: int, softcap: Any,
    queries: Any, query_starts: Any, context_lens: Any, tables: Any, keys: Any, values: Any,
    key_scales: Any, value_scales: Any, out: Any,
) -> Work:  # fmt: skip
    """`key_level`: 0 for floats; `queries` [KV, tokens, group, bytes]; the rest as in `Work`."""
    num_kv_heads, max_tokens, group, num_bytes = queries.shape
    by_head = queries.reshape(num_kv_heads, max_tokens * group, num_bytes)
    return Work(
        tiles, key_level > 0, head_size, group, window, softcap, by_head, query_starts,
        context_lens, tables, keys, values, key_scales, value_scales, out,
    )  # fmt: skip


@compiled
def attend_part(turns: Turns, work: Work, scratch: Scratch) -> tuple[int, int]:
    """What this thread comes to take of a layer's attention: of how many items, and how many."""
    weights, sums = scratch.weights[turns.part], scratch.sums[turns.part]
    most_units, most_spans = scratch.done.shape[0], scratch.places.shape[0]
    num_spans = num_shared_spans(work, turns.num_threads, most_units, most_spans)
    if num_spans > 0:
        return _attend_spans(work, num_spans, turns, weights, scratch, sums[0])
    return _attend_units(work, turns, weights, sums[0], sums[1])


@compiled
def run_part(
    part: int, num_parts: int, writes: bool, attends: bool, tiles: Any,
    key_level: int, value_level: int, head_size: int, positions: Any, slots: Any, query_starts: Any,
    context_lens: Any, tables: Any, queries: Any, scratch: Scratch, counters: Any, cos: Any,
    sin: Any, scale: Any, window: int, softcap: Any, qkv: Any, keys: Any, values: Any,
    key_scales: Any, value_scales: Any, out: Any,
) -> None:  # fmt: skip
    """The tokens to write that fall to one of `num_parts` parts, and what it takes to attend.

    `tiles`: as in `Work`. `counters`: those of `Turns`. `scale`, `softcap`: float32.
    """
    if writes:
        num_tokens = positions.shape[0]
        write_tokens(
            part * num_tokens // num_parts, (part + 1) * num_tokens // num_parts, part, key_level,
            value_level, head_size, positions, slots, queries, scratch, cos, sin, scale, qkv, keys,
            values, key_scales, value_scales,
        )  # fmt: skip
    if attends:
        work = make_work(
            tiles, key_level, head_size, window, softcap, queries, query_starts,
            context_lens, tables, keys, values, key_scales, value_scales, out,
        )  # fmt: skip
        attend_part(Turns(part, num_parts, counters.ctypes.data), work, scratch)


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
        self._num_threads = num_threads
        self._helpers = ThreadPoolExecutor(max(1, num_threads - 1), "attention")
        self._layers = layer_arguments(config, max_model_len)
        self._queries, self._scratch = make_buffers(
            config, kv_format, max_tokens, num_threads, max_model_len
        )
        self._counters = np.zeros(num_threads * COUNTER_BYTES // 8, np.int64)
        self._tiles = open_tiles(kv_format, config.num_heads // config.num_kv_heads)
        self._sizes = (kv_format.keys.max_level, kv_format.values.max_level, config.head_size)

    def begin(self, batch: Batch) -> Attend:
        step = (
            self._tiles, *self._sizes,
            batch.positions, batch.slot_mapping, batch.query_starts, batch.context_lens,
            batch.block_tables, self._queries, self._scratch, self._counters,
        )  # fmt: skip
        if self._num_threads == 1 or num_pairs(batch) < MIN_PARALLEL_PAIRS:
            return partial(self._alone, step)
        return partial(self._on_all_threads, step)

    def _on_all_threads(
        self, step: tuple[Any, ...], qkv: Float32Array, pages: LayerPages, out: Float32Array
    ) -> None:
        arguments = (*step, *self._layers[pages.layer], qkv, *pages.arrays, out)
        self._counters[:] = 0
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
        self._counters[:] = 0
        run_part(0, 1, True, True, *step, *layer, qkv, *pages.arrays, out)


def make_buffers(
    config: ModelConfig, kv_format: KVFormat, max_tokens: int, num_threads: int, max_model_len: int
) -> tuple[NDArray[np.uint8], Scratch]:
    """`queries` [KV, tokens, group, bytes], and the scratch of all threads."""
    padded_size = kv_format.padded_size(config.head_size)
    group = config.num_heads // config.num_kv_heads
    # A tile may read past the last row: room for one more.
    shape = config.num_kv_heads, max_tokens + MAX_TILE_ROWS, group
    queries = np.zeros((*shape, query_size(kv_format, padded_size)), np.uint8)
    most_units = SHARED_UNITS_PER_THREAD * num_threads if num_threads > 1 else 0
    most_spans = min(most_units * -(-max_model_len // SPAN_KEYS), MAX_SHARED_SPANS)
    return queries, make_scratch(kv_format, padded_size, num_threads, most_units, most_spans)


def query_size(kv_format: KVFormat, padded_size: int) -> int:
    """Bytes of a query as its tile wants it: float32, or rounded (`query_bytes`)."""
    if kv_format.keys.max_level == 0:
        return 4 * padded_size
    num_bytes = query_bytes(padded_size, kv_format.keys.num_groups(padded_size))
    return num_bytes + -num_bytes % _CACHE_LINE


def make_scratch(
    kv_format: KVFormat, padded_size: int, num_threads: int, most_units: int, most_spans: int
) -> Scratch:
    width = padded_size + 2
    floats = max(weight_floats(kv_format.values.num_groups(padded_size)), padded_size)
    floats += -floats % (_CACHE_LINE // 4)
    return Scratch(
        weights=np.zeros((num_threads, MAX_TILE_ROWS, floats), np.float32),
        sums=np.zeros((num_threads, 2, MAX_TILE_ROWS, width), np.float32),
        places=np.zeros((most_spans, MAX_TILE_ROWS, width), np.float32),
        done=np.zeros((most_units, _CACHE_LINE // 8), np.int64),
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
