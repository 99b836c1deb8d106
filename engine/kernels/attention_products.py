"""Attention over quantized pages in integer dot products: queries times keys, weights times values.

Queries and weights have 16 bits, in two bytes: x = 256 * high + low. A dot product with 8-bit keys
or values is two of bytes, and the sum is exact, so neither the rows beside a row nor the order of
its keys change a bit. What is stored where: `kv_format.py` for pages, `rounding_simd.py` for
queries, `attention_simd.py` for weights. Addresses are plain integers; nothing is bounds-checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.kernels.attention_simd import DECAY, FACTORS, PACKED, PACKED_GROUP, ROW_KEYS, emit_block
from engine.kernels.dot_product import dot, dot_product_kind, ints, splat
from engine.kernels.simd import LANES, Emitter, intrinsic, result_of
from engine.vector_sizes import INT4_GROUP_SIZE

_F32, _I8, _I32 = ir.FloatType(), ir.IntType(8), ir.IntType(32)
_F32V, _I32V = (ir.VectorType(kind, LANES) for kind in (_F32, _I32))
_VECTOR_BYTES = 4 * LANES
_TOKENS = 4  # of a dot product over tokens; one over dimensions has as many dimensions
_STEPS = LANES // _TOKENS
_LOW_NIBBLES, _HIGH_NIBBLES = 0x0F0F0F0F, -0x0F0F0F10
_LEVEL_STEP = 1 / 16  # 4-bit values come as 16 times their level


class AtOnce(NamedTuple):
    """What a machine's registers hold the sums of: so many query rows times so many vectors."""

    rows: int
    vectors: int


_AT_ONCE = {"avx512vnni": AtOnce(6, 2), "avxvnni": AtOnce(2, 1), "i8mm": AtOnce(2, 1),
            "none": AtOnce(1, 1)}  # fmt: skip


Rows = list[int]
Pair = tuple[Any, Any]


def _row_parts(num_rows: int, most: int) -> Iterator[Rows]:
    """The rows in parts of at most so many, as equal as can be."""
    num_parts = -(-num_rows // most)
    for part in range(num_parts):
        yield list(range(part * num_rows // num_parts, (part + 1) * num_rows // num_parts))


def _row(e: Emitter, address: Any, stride: Any, r: int) -> Any:
    return e.b.add(address, e.scaled(stride, r))


class _Sum:
    """The sums of products with high and low bytes, as variables that loops may change."""

    def __init__(self, e: Emitter, start: Any) -> None:
        self._high = cgutils.alloca_once(e.b, _I32V)
        self._low = cgutils.alloca_once(e.b, _I32V)
        e.b.store(ints(0), self._high)
        e.b.store(start, self._low)

    def add(self, e: Emitter, kind: str, unsigned: Pair, signed: Pair) -> None:
        """`unsigned` and `signed`: what is multiplied for the high sum, and for the low one."""
        for slot, u, s in zip((self._high, self._low), unsigned, signed, strict=True):
            e.b.store(dot(e, kind, e.b.load(slot), u, s), slot)

    def value(self, e: Emitter) -> Any:
        """256 * high + low as float32; it fits 32 bits, whatever its parts do."""
        high = e.b.shl(e.b.load(self._high), ints(8))
        return e.b.sitofp(e.b.add(high, e.b.load(self._low)), _F32V)


class Block(NamedTuple):
    """Addresses: a block's keys and their scales, where its scores go, and what will be read later:
    another block's keys and values, and their scales."""

    keys: Any
    scales: Any
    out: Any
    later_keys: Any
    later_values: Any
    later_key_scales: Any
    later_value_scales: Any


@intrinsic
def scores(
    typing_context: Any, rows: Any, bits: Any, value_bits: Any, queries: Any, query_stride: Any,
    size: Any, out: Any, out_stride: Any, keys: Any, scales: Any, later_keys: Any,
    later_values: Any, later_key_scales: Any, later_value_scales: Any, other_keys: Any,
    other_scales: Any, other_later_keys: Any, other_later_values: Any,
    other_later_key_scales: Any, other_later_value_scales: Any,
) -> Any:  # fmt: skip
    """out[r, 0:32] = row r's query times the 16 keys of one block and the 16 of another.

    `rows`, `bits` and `value_bits` are tuples, whose lengths tell the number of rows and the bits
    of a key and a value; the rest are addresses, strides in bytes and the padded size of a head.
    `queries`: as in `query_bytes`; a score lacks the query's scale. What is read later is only
    fetched.
    """
    bits_of, kind = (len(bits), len(value_bits)), dot_product_kind()

    def emit(e: Emitter, values: Sequence[Any]) -> None:
        emit_scores(e, kind, bits_of, len(rows), *values[3:])

    return result_of(types.void(rows, bits, value_bits, *[types.int64] * 17), emit)


def emit_scores(
    e: Emitter, kind: str, bits: tuple[int, int], num_rows: int, queries: Any, query_stride: Any,
    size: Any, out: Any, out_stride: Any, *pages: Any,
) -> None:  # fmt: skip
    score_rows = _score_rows_int8 if bits[0] == 8 else _score_rows_int4
    outs = out, e.b.add(out, e.i64(_VECTOR_BYTES))
    blocks = [
        Block(keys, scales, place, *ahead)
        for place, (keys, scales, *ahead) in zip(outs, (pages[:6], pages[6:]), strict=True)
    ]
    at_once = _AT_ONCE[kind]
    for part in _row_parts(num_rows, at_once.rows):
        places = [_row(e, queries, query_stride, r) for r in part]
        for start in range(0, len(blocks), at_once.vectors):
            taken = blocks[start : start + at_once.vectors]
            if part[0] == 0:
                _fetch_scales(e, taken, bits)
            found = score_rows(e, kind, places, size, taken, bits if part[0] == 0 else None)
            for block, by_row in zip(taken, found, strict=True):
                for r, value in zip(part, by_row, strict=True):
                    e.store(value, block.out, e.scaled(out_stride, r))


def _load_keys(
    e: Emitter, blocks: Sequence[Block], place: Any, fetched: tuple[int, int] | None
) -> list[Any]:
    """A vector of each block's keys. `fetched`: the bits of keys and values, if the same places of
    the pages that are read later are to be fetched."""
    if fetched:
        value_place = e.b.udiv(e.scaled(place, fetched[1]), e.i64(fetched[0]))
        for block in blocks:
            _fetch(e, e.pointer(block.later_keys, place, _I8))
            _fetch(e, e.pointer(block.later_values, value_place, _I8))
    return [e.load(block.keys, place, _I32V, align=1) for block in blocks]


def _fetch_scales(e: Emitter, blocks: Sequence[Block], bits: tuple[int, int]) -> None:
    """As many as the smallest head has, with 4 bits a line for each of two groups."""
    for block in blocks:
        addresses = block.later_key_scales, block.later_value_scales
        for address, of in zip(addresses, bits, strict=True):
            for line in range(1 if of == 8 else 2):
                _fetch(e, e.pointer(address, e.i64(_VECTOR_BYTES * line), _I8))


def _fetch(e: Emitter, pointer: Any) -> None:
    kinds = [pointer.type, *[_I32] * 3]
    function_type = ir.FunctionType(ir.VoidType(), kinds)
    name = "llvm.prefetch.p0i8"
    function = cgutils.get_or_insert_function(e.b.module, function_type, name)
    to_read, keep, data = (ir.Constant(_I32, number) for number in (0, 2, 1))
    e.b.call(function, [pointer, to_read, keep, data])


def _add_keys(
    e: Emitter, kind: str, sums: Sequence[Sequence[_Sum]], queries: Sequence[Any], size: Any,
    first: Any, keys: Sequence[Any],
) -> None:  # fmt: skip
    """sums[block][row] += the products of dimensions `first` to `first` + 3."""
    low_place = e.b.add(size, first)
    for r, query in enumerate(queries):
        levels = splat(e, e.load(query, first, _I32)), splat(e, e.load(query, low_place, _I32))
        for key, by_row in zip(keys, sums, strict=True):
            by_row[r].add(e, kind, (key, key), levels)


def _biases(e: Emitter, queries: Sequence[Any], size: Any, group: Any) -> list[Any]:
    place = e.b.add(e.scaled(size, 2), e.scaled(group, 4))
    return [splat(e, e.load(query, place, _I32)) for query in queries]


def _score_rows_int8(
    e: Emitter, kind: str, queries: Sequence[Any], size: Any, blocks: Sequence[Block],
    fetched: tuple[int, int] | None,
) -> list[list[Any]]:  # fmt: skip
    starts = _biases(e, queries, size, e.i64(0))
    sums = [[_Sum(e, start) for start in starts] for _ in blocks]
    with cgutils.for_range(e.b, e.b.udiv(size, e.i64(LANES))) as loop:
        for step in range(_STEPS):
            first = e.b.add(e.scaled(loop.index, LANES), e.i64(step * _TOKENS))
            place = e.scaled(first, LANES)
            vectors = _load_keys(e, blocks, place, fetched)
            _add_keys(e, kind, sums, queries, size, first, vectors)
    found = []
    for block, by_row in zip(blocks, sums, strict=True):
        scale = e.load(block.scales, e.i64(0), _F32V)
        found.append([e.b.fmul(each.value(e), scale) for each in by_row])
    return found


def _score_rows_int4(
    e: Emitter, kind: str, queries: Sequence[Any], size: Any, blocks: Sequence[Block],
    fetched: tuple[int, int] | None,
) -> list[list[Any]]:  # fmt: skip
    half = INT4_GROUP_SIZE // 2
    totals = [[e.slot() for _ in queries] for _ in blocks]
    for slot in (slot for by_row in totals for slot in by_row):
        e.b.store(ir.Constant(_F32V, [0.0] * LANES), slot)
    with cgutils.for_range(e.b, e.b.udiv(size, e.i64(INT4_GROUP_SIZE))) as loop:
        starts = _biases(e, queries, size, loop.index)
        sums = [[_Sum(e, start) for start in starts] for _ in blocks]
        for step in range(_STEPS):
            first = e.b.add(e.scaled(loop.index, INT4_GROUP_SIZE), e.i64(step * _TOKENS))
            place = e.b.add(e.scaled(loop.index, half * LANES), e.i64(step * _VECTOR_BYTES))
            packed = _load_keys(e, blocks, place, fetched)
            low = [e.b.and_(each, ints(_LOW_NIBBLES)) for each in packed]
            high = [e.b.and_(e.b.lshr(each, ints(4)), ints(_LOW_NIBBLES)) for each in packed]
            _add_keys(e, kind, sums, queries, size, first, low)
            _add_keys(e, kind, sums, queries, size, e.b.add(first, e.i64(half)), high)
        for block, slots, by_row in zip(blocks, totals, sums, strict=True):
            scale = e.load(block.scales, e.scaled(loop.index, _VECTOR_BYTES), _F32V)
            for slot, each in zip(slots, by_row, strict=True):
                e.b.store(e.fma(each.value(e), scale, e.b.load(slot)), slot)
    return [[e.b.load(slot) for slot in by_row] for by_row in totals]


@intrinsic
def weighted_sum(
    typing_context: Any, rows: Any, bits: Any, weights: Any, weight_stride: Any, values: Any,
    value_stride: Any, table: Any, first: Any, end: Any, size: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """out[r] = out[r] * decay + the tile's values weighted, blocks `first` to `end` of it.

    `rows`, `bits`, `size`: as in `scores`; `weights`: as in `weight_floats`; `values`,
    `value_stride` and `table` as scales in `_Scaled`; `out` float32.
    """
    numbers, kind = (len(bits), len(rows)), dot_product_kind()

    def emit(e: Emitter, arguments: Sequence[Any]) -> None:
        emit_weighted_sum(e, kind, *numbers, *arguments[2:])

    return result_of(types.void(rows, bits, *[types.int64] * 10), emit)


def emit_weighted_sum(
    e: Emitter, kind: str, bits: int, num_rows: int, weights: Any, weight_stride: Any,
    values: Any, value_stride: Any, table: Any, first: Any, end: Any, size: Any, out: Any,
    out_stride: Any,
) -> None:  # fmt: skip
    at_once = _AT_ONCE[kind]
    num_vectors = 2 if bits == 4 else at_once.vectors
    num_chunks = e.b.udiv(size, e.i64(LANES))
    num_steps = e.b.udiv(e.b.add(num_chunks, e.i64(num_vectors - 1)), e.i64(num_vectors))
    most_rows = max(1, at_once.rows * at_once.vectors // num_vectors)
    for part in _row_parts(num_rows, most_rows):
        places = [_row(e, weights, weight_stride, r) for r in part]
        with cgutils.for_range(e.b, num_steps) as steps:
            chunks = _chunks(e, steps.index, num_vectors, num_chunks)
            group = steps.index if bits == 4 else e.i64(0)
            packed = e.b.add(e.scaled(group, PACKED_GROUP), e.i64(PACKED))
            sums = [[_Sum(e, ints(0)) for _ in part] for _ in chunks]
            with cgutils.for_range_slice(e.b, first, end, e.i64(1)) as (index, _):
                block = e.b.add(values, e.b.mul(emit_block(e, table, index), value_stride))
                for step in range(_STEPS):
                    vectors = _value_vectors(e, bits, block, chunks, step)
                    place = e.b.add(packed, e.scaled(index, LANES))
                    place = e.b.add(place, e.i64(step * _TOKENS))
                    _add_values(e, kind, sums, places, place, vectors)
            outs = [_row(e, out, out_stride, r) for r in part]
            factor = e.b.add(e.scaled(group, 4), e.i64(FACTORS))
            level_step = 1.0 if bits == 8 else _LEVEL_STEP
            _store_sums(e, sums, places, factor, level_step, outs, chunks)


def _chunks(e: Emitter, step: Any, num_vectors: int, num_chunks: Any) -> list[Any]:
    """Of 16 dimensions. The last one counts twice where there is an odd number of them."""
    if num_vectors == 1:
        return [step]
    start, last = e.scaled(step, 2), e.b.sub(num_chunks, e.i64(1))
    other = e.b.add(start, e.i64(1))
    return [start, e.b.select(e.b.icmp_unsigned(">", other, last), last, other)]


def _value_vectors(
    e: Emitter, bits: int, block: Any, chunks: Sequence[Any], step: int
) -> list[Any]:
    """[16 dimensions, 4 tokens] bytes of each chunk, for 4 bits in the high half of the byte."""
    chunk_bytes = _STEPS * _VECTOR_BYTES
    if bits == 8:
        places = [e.b.add(e.scaled(each, chunk_bytes), e.i64(step * _VECTOR_BYTES))
                  for each in chunks]  # fmt: skip
        return [e.load(block, place, _I32V, align=1) for place in places]
    place = e.scaled(e.b.udiv(chunks[0], e.i64(2)), chunk_bytes)
    place = e.b.add(place, e.i64(step * _VECTOR_BYTES))
    packed = e.load(block, place, _I32V, align=1)
    low = e.b.and_(e.b.shl(packed, ints(4)), ints(_HIGH_NIBBLES))
    return [low, e.b.and_(packed, ints(_HIGH_NIBBLES))]


def _add_values(
    e: Emitter, kind: str, sums: Sequence[Sequence[_Sum]], weights: Sequence[Any], place: Any,
    vectors: Sequence[Any],
) -> None:  # fmt: skip
    low_place = e.b.add(place, e.i64(ROW_KEYS))
    for r, row in enumerate(weights):
        levels = splat(e, e.load(row, place, _I32)), splat(e, e.load(row, low_place, _I32))
        for vector, by_row in zip(vectors, sums, strict=True):
            by_row[r].add(e, kind, levels, (vector, vector))


def _store_sums(
    e: Emitter, sums: Sequence[Sequence[_Sum]], weights: Sequence[Any], factor: Any,
    level_step: float, outs: Sequence[Any], chunks: Sequence[Any],
) -> None:  # fmt: skip
    for r, (row, out) in enumerate(zip(weights, outs, strict=True)):
        decay = splat(e, e.load(row, e.i64(DECAY), _F32))
        scale = splat(e, e.b.fmul(e.load(row, factor, _F32), ir.Constant(_F32, level_step)))
        places = [e.scaled(chunk, _VECTOR_BYTES) for chunk in chunks]
        before = [e.b.fmul(e.load(out, place, _F32V), decay) for place in places]
        for place, old, by_row in zip(places, before, sums, strict=True):
            e.store(e.fma(by_row[r].value(e), scale, old), out, place)
