"""From scores to 16-bit weights: the vector pieces of attention over quantized pages.

A weight, times the scale of its value, is rounded relative to the largest one of its row in a tile
of 128 keys, and kept as two bytes: x = 256 * high + low. Floats are added lane by lane, then across
the lanes by halves: masked keys add exact zeros, so a row's result does not depend on how many of
them there are. Addresses are plain integers; nothing is bounds-checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.kernels.dot_product import ints, splat
from engine.kernels.simd import (
    LANES,
    ROUND_MAGIC,
    Emitter,
    add,
    fold,
    intrinsic,
    larger,
    result_of,
)
from engine.vector_sizes import TILE_KEYS

_F32, _I8, _I32 = ir.FloatType(), ir.IntType(8), ir.IntType(32)
_F32V, _I8V, _I32V = (ir.VectorType(kind, LANES) for kind in (_F32, _I8, _I32))
_VECTOR_BYTES = 4 * LANES

MAX_GROUPS = 8  # of 32 dimensions, in the largest head
MAX_WEIGHT_LEVEL = 65535
MIN_WEIGHT = 1e-30
"""A tile of keys whose largest weight, times its value's scale, is smaller weighs nothing."""
_INTEGER_MAGIC = 8388608.0  # 2 ** 23: added to a float, leaves its integer in the low bits

# 2 ** f = 1 + f * p(f) for |f| <= 1/2: least largest relative error, 1.6e-7 in float32.
EXP2_POLYNOMIAL = (0.001326472731307149, 0.009671512991189957, 0.05550733581185341,
                   0.24022242426872253, 0.6931470036506653)  # fmt: skip
EXP2_UNDERFLOW = -127.0
"""2 ** x is exactly 0 from here down."""


# A row of a tile's 128 keys as bytes: float32 scores, then weights; floats that a row's next steps
# need; per group of dimensions, the high bytes of its weights and then the low ones. Blocks come
# in pairs, so there is room for one block more.
ROW_KEYS = TILE_KEYS + LANES
DECAY = 4 * ROW_KEYS
"""What the row's sums so far are to be multiplied by."""
SCALE = DECAY + 4
SHIFT = SCALE + 4
"""A weight is 2 ** (score * scale - shift)."""
FACTORS = SHIFT + 4
INVERSES = FACTORS + 4 * MAX_GROUPS
"""Per group: what its integers are to be multiplied by; what made integers of its weights."""
PACKED = DECAY + 2 * _VECTOR_BYTES
PACKED_GROUP = 2 * ROW_KEYS


def weight_floats(num_groups: int) -> int:
    """Of a tile's row, in float32."""
    return (PACKED + num_groups * PACKED_GROUP) // 4


def power_of_two(e: Emitter, x: Any) -> Any:
    """2 ** x for x <= 100; exactly 0 from -127 down, exactly 1 at 0, NaN for numpy's NaN."""
    b = e.b
    least = e.constant(EXP2_UNDERFLOW, x)
    x = b.select(b.fcmp_ordered(">", least, x), least, x)
    magic = e.constant(ROUND_MAGIC, x)
    shifted = b.fadd(x, magic)
    f = b.fsub(x, b.fsub(shifted, magic))
    p = e.constant(EXP2_POLYNOMIAL[0], x)
    for coefficient in (*EXP2_POLYNOMIAL[1:], 1.0):
        p = e.fma(p, f, e.constant(coefficient, x))
    # The low 9 bits of `magic` are 0, so what is left of the shift is the exponent.
    is_vector = isinstance(x.type, ir.VectorType)
    kind = _I32V if is_vector else _I32
    places = ints(23) if is_vector else ir.Constant(_I32, 23)
    exponent = b.shl(b.bitcast(shifted, kind), places)
    return b.bitcast(b.add(b.bitcast(p, kind), exponent), x.type)


@intrinsic
def exp2(typing_context: Any, x: Any) -> Any:
    """exp2(x) -> the same power of two as `row_exp2`, for one float32."""
    return result_of(types.float32(types.float32), lambda e, values: power_of_two(e, values[0]))


@intrinsic
def load_float(typing_context: Any, address: Any) -> Any:
    """load_float(address) -> float32."""
    return result_of(types.float32(types.int64), lambda e, at: e.load(at[0], e.i64(0), _F32))


@intrinsic
def store_float(typing_context: Any, address: Any, value: Any) -> Any:
    """store_float(address, float32)."""

    def emit(e: Emitter, values: Sequence[Any]) -> None:
        e.store(values[1], values[0], e.i64(0))

    return result_of(types.void(types.int64, types.float32), emit)


@intrinsic
def load_index(typing_context: Any, address: Any) -> Any:
    """load_index(address of an int32) -> int64."""

    def emit(e: Emitter, values: Sequence[Any]) -> Any:
        return e.b.sext(e.load(values[0], e.i64(0), _I32), ir.IntType(64))

    return result_of(types.int64(types.int64), emit)


@intrinsic
def row_exp2(typing_context: Any, row: Any, first: Any, end: Any) -> Any:
    """row = 2 ** (row * scale - shift) in vectors `first` to `end` -> their sum."""
    return result_of(types.float32(*[types.int64] * 3), _emit_row_exp2)


def _variable(e: Emitter, value: float) -> Any:
    slot = e.slot()
    e.b.store(ir.Constant(_F32V, [value] * LANES), slot)
    return slot


def _emit_row_exp2(e: Emitter, arguments: Sequence[Any]) -> Any:
    row, first, end = arguments
    scale, shift = (splat(e, e.load(row, e.i64(at), _F32)) for at in (SCALE, SHIFT))
    total, negative = _variable(e, 0.0), e.b.fneg(shift)
    with cgutils.for_range_slice(e.b, first, end, e.i64(1)) as (index, _):
        place = e.scaled(index, _VECTOR_BYTES)
        value = power_of_two(e, e.fma(e.load(row, place, _F32V), scale, negative))
        e.store(value, row, place)
        e.b.store(e.b.fadd(e.b.load(total), value), total)
    return fold(e, e.b.load(total), add)


@intrinsic
def row_maximum(typing_context: Any, row: Any, first: Any, end: Any) -> Any:
    """row_maximum(address, first vector, end) -> the largest float32, NaNs passed over."""
    return result_of(types.float32(*[types.int64] * 3), _emit_row_maximum)


def _emit_row_maximum(e: Emitter, arguments: Sequence[Any]) -> Any:
    row, first, end = arguments
    best = _variable(e, float("-inf"))
    with cgutils.for_range_slice(e.b, first, end, e.i64(1)) as (index, _):
        value = e.load(row, e.scaled(index, _VECTOR_BYTES), _F32V)
        e.b.store(larger(e, value, e.b.load(best)), best)
    return fold(e, e.b.load(best), larger)


class _Scaled:
    """A row's weights times the scales of their values: those of block 0 are at an address, block
    b's b * `stride` bytes on; `table` has the int32 numbers of the row's blocks."""

    def __init__(self, row: Any, scales: Any, stride: Any, table: Any) -> None:
        self._row, self._scales, self._stride, self._table = row, scales, stride, table

    def vector(self, e: Emitter, index: Any) -> Any:
        place = e.b.mul(emit_block(e, self._table, index), self._stride)
        weights = e.load(self._row, e.scaled(index, _VECTOR_BYTES), _F32V)
        return e.b.fmul(weights, e.load(self._scales, place, _F32V))


@intrinsic
def scale_weights(
    typing_context: Any, row: Any, first: Any, end: Any, scales: Any, scale_stride: Any,
    table: Any, group: Any,
) -> Any:  # fmt: skip
    """The row's factor and inverse of a group, from the largest of its weights times `scales`.

    Vectors `first` to `end`; `scales` and the two after it: see `_Scaled`.
    """
    return result_of(types.void(*[types.int64] * 7), _emit_scale_weights)


def _emit_scale_weights(e: Emitter, arguments: Sequence[Any]) -> None:
    row, first, end, scales, stride, table, group = arguments
    b, scaled, best = e.b, _Scaled(row, scales, stride, table), _variable(e, 0.0)
    with cgutils.for_range_slice(b, first, end, e.i64(1)) as (index, _):
        b.store(larger(e, scaled.vector(e, index), b.load(best)), best)
    largest = fold(e, b.load(best), larger)
    zero, one, least, levels, step = (
        ir.Constant(_F32, each)
        for each in (0.0, 1.0, MIN_WEIGHT, MAX_WEIGHT_LEVEL, 1.0 / MAX_WEIGHT_LEVEL)
    )
    is_some = b.fcmp_ordered(">", largest, least)
    inverse = b.select(is_some, b.fdiv(levels, b.select(is_some, largest, one)), zero)
    place = e.scaled(group, 4)
    e.store(b.select(is_some, b.fmul(largest, step), zero), row, b.add(place, e.i64(FACTORS)))
    e.store(inverse, row, b.add(place, e.i64(INVERSES)))


@intrinsic
def pack_weights(
    typing_context: Any, row: Any, first: Any, end: Any, scales: Any, scale_stride: Any,
    table: Any, group: Any,
) -> Any:  # fmt: skip
    """The row's weights times `scales` in 16 bits. Arguments as in `scale_weights`."""
    return result_of(types.void(*[types.int64] * 7), _emit_pack_weights)


def _emit_pack_weights(e: Emitter, arguments: Sequence[Any]) -> None:
    row, first, end, scales, stride, table, group = arguments
    b, scaled, last = e.b, _Scaled(row, scales, stride, table), e.b.sub(end, e.i64(1))
    inverse = splat(e, e.load(row, b.add(e.scaled(group, 4), e.i64(INVERSES)), _F32))
    magic = ir.Constant(_F32V, [_INTEGER_MAGIC] * LANES)
    packed = b.add(b.add(row, e.i64(PACKED)), e.scaled(group, PACKED_GROUP))
    pair = ir.VectorType(_I8, 2 * LANES)
    with cgutils.for_range_slice(b, first, end, e.i64(2)) as (index, _):
        other = b.add(index, e.i64(1))
        other = b.select(b.icmp_signed(">", other, last), last, other)
        whole = [
            b.bitcast(e.fma(scaled.vector(e, each), inverse, magic), ir.VectorType(_I8, 4 * LANES))
            for each in (index, other)
        ]
        place = e.scaled(index, LANES)
        for byte, at in ((1, 0), (0, ROW_KEYS)):
            lanes = [4 * lane + byte for lane in range(2 * LANES)]
            mask = ir.Constant(ir.VectorType(_I32, 2 * LANES), lanes)
            narrow = b.shuffle_vector(*whole, mask)
            b.store(narrow, e.pointer(packed, b.add(place, e.i64(at)), pair), align=1)


def emit_block(e: Emitter, table: Any, index: Any) -> Any:
    return e.b.sext(e.load(table, e.scaled(index, 4), _I32), ir.IntType(64))
