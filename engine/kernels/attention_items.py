"""A layer's attention as items that threads take in turn: units, or spans of their keys.

A unit is a sequence, a tile of its query rows and a KV head; a span is 512 keys of a unit. Numbers
say what follows what in memory. Pure arithmetic on arrays of sizes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from engine.kernels.attention_tiles import MAX_TILE_ROWS
from engine.kernels.compiled import compiled
from engine.kernels.thread_team import num_chunks
from engine.vector_sizes import SPAN_KEYS, TILE_KEYS

SHARED_UNITS_PER_THREAD = 8
MAX_SHARED_SPANS = 2048


class Work(NamedTuple):
    """One layer's attention. `tiles`: see `attention_tiles.AttentionTiles`; `queries`
    [KV, tokens * group, bytes], as tiles want them; `out` [T, H * D]; the rest as in `Batch` and
    `LayerPages`."""

    tiles: Any
    is_quantized: bool
    head_size: int
    group: int
    window: int
    softcap: Any
    queries: Any
    query_starts: Any
    context_lens: Any
    tables: Any
    keys: Any
    values: Any
    key_scales: Any
    value_scales: Any
    out: Any


class Tile(NamedTuple):
    """`num_rows` query rows of sequence `s`, from its row `start` on, and the keys `begin` to `end`
    that any of them may see. The sequence's first query row may see `first_limit` keys. `code`: the
    address of what computes it, as if it had `code_rows` rows."""

    code: int
    code_rows: int
    s: int
    start: int
    num_rows: int
    first_limit: int
    begin: int
    end: int
    num_spans: int


@compiled
def _num_query_rows(work: Work, s: int) -> int:
    return (work.query_starts[s + 1] - work.query_starts[s]) * work.group


@compiled
def tile_of(work: Work, s: int, start: int) -> Tile:
    num_query_rows = _num_query_rows(work, s)
    tiles, count = work.tiles, min(MAX_TILE_ROWS, num_query_rows - start)
    code, code_rows = tiles.large, MAX_TILE_ROWS
    if count <= tiles.few:
        code, code_rows = tiles.small, tiles.few
    first_limit = work.context_lens[s] - num_query_rows // work.group + 1
    begin = 0
    if work.window > 0:
        begin = max(first_limit + start // work.group - work.window, 0)
    end = first_limit + (start + count - 1) // work.group
    num_spans = (end + SPAN_KEYS - 1) // SPAN_KEYS - begin // SPAN_KEYS
    return Tile(code, code_rows, s, start, count, first_limit, begin, end, num_spans)


@compiled
def bounds_of(tile: Tile, span: int) -> tuple[int, int]:
    """The first key of a span, at a multiple of TILE_KEYS, and the end of it."""
    start = (tile.begin // SPAN_KEYS + span) * SPAN_KEYS
    return max(tile.begin // TILE_KEYS * TILE_KEYS, start), min(tile.end, start + SPAN_KEYS)


class Unit(NamedTuple):
    """All keys of a tile, in one head."""

    tile: Tile
    head: int


@compiled
def _num_tiles(work: Work, s: int) -> int:
    return num_chunks(_num_query_rows(work, s), MAX_TILE_ROWS)


@compiled
def num_units_of(work: Work) -> int:
    count = 0
    for s in range(work.context_lens.shape[0]):
        count += _num_tiles(work, s)
    return count * work.queries.shape[0]


@compiled
def unit_of(work: Work, number: int) -> Unit:
    """A head's units follow each other, so that its keys are still near."""
    s, num_heads = 0, work.queries.shape[0]
    while number >= num_heads * _num_tiles(work, s):
        number -= num_heads * _num_tiles(work, s)
        s += 1
    num_tiles = _num_tiles(work, s)
    return Unit(tile_of(work, s, number % num_tiles * MAX_TILE_ROWS), number // num_tiles)


class SpanItem(NamedTuple):
    """Span `span` of unit number `unit`, whose spans' results begin at `place`."""

    tile: Tile
    head: int
    span: int
    unit: int
    place: int


@compiled
def span_item(work: Work, number: int) -> SpanItem:
    """All heads' same spans follow each other, as they do in memory."""
    num_heads, s, start, unit, place = work.queries.shape[0], 0, 0, 0, 0
    tile = tile_of(work, 0, 0)
    while number >= place + num_heads * tile.num_spans:
        place, unit = place + num_heads * tile.num_spans, unit + num_heads
        start += MAX_TILE_ROWS
        if start >= _num_query_rows(work, s):
            s, start = s + 1, 0
        tile = tile_of(work, s, start)
    head, span = (number - place) % num_heads, (number - place) // num_heads
    return SpanItem(tile, head, span, unit + head, place + head)


@compiled
def num_shared_spans(work: Work, num_threads: int, most_units: int, most_spans: int) -> int:
    """Of all units, if there are so few of these that threads share their spans, and no more units
    and spans than there is room for; else 0."""
    num_kv_heads, num_units, num_spans = work.queries.shape[0], 0, 0
    for s in range(work.context_lens.shape[0]):
        for start in range(0, _num_query_rows(work, s), MAX_TILE_ROWS):
            num_units += num_kv_heads
            num_spans += num_kv_heads * tile_of(work, s, start).num_spans
            if num_units > min(SHARED_UNITS_PER_THREAD * num_threads, most_units):
                return 0
    is_shared = num_threads > 1 and num_units < num_spans <= most_spans
    return num_spans if is_shared else 0
