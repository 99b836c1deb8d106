"""Heads' vectors in fewer bits: queries in 16, and what pages' scales need to know of a vector.

Addresses are plain integers; nothing is bounds-checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.kernels.dot_product import call, ints, splat
from engine.kernels.simd import LANES, ROUND_MAGIC, ROUND_MAGIC_BITS, Emitter, intrinsic, result_of
from engine.kv_format import MAX_MAGNITUDE, MIN_SCALE

_F32, _I8, _I32 = ir.FloatType(), ir.IntType(8), ir.IntType(32)
_F32V, _I8V, _I32V = (ir.VectorType(kind, LANES) for kind in (_F32, _I8, _I32))
_VECTOR_BYTES = 4 * LANES

MAX_QUERY_LEVEL = 32639  # 256 * 127 + 127: the high byte of what is rounded to it is 127


def query_bytes(size: int, num_groups: int) -> int:
    """Of a query of padded size D: D high bytes, D low ones, the biases of its products with keys
    (int32 per group of dimensions), its scale (float32)."""
    return 2 * size + 4 * num_groups + 4


def query_places(e: Emitter, size: Any, num_groups: Any) -> tuple[Any, Any]:
    """Where the biases are, and the scale."""
    biases = e.scaled(size, 2)
    return biases, e.b.add(biases, e.scaled(num_groups, 4))


@intrinsic
def largest_magnitude(typing_context: Any, x: Any, size: Any) -> Any:
    """Of `size` float32, a multiple of 16; a NaN is the largest."""

    def emit(e: Emitter, arguments: Sequence[Any]) -> Any:
        return _largest_magnitude(e, *arguments)

    return result_of(types.float32(types.int64, types.int64), emit)


def _largest_magnitude(e: Emitter, x: Any, size: Any) -> Any:
    """Compared as integers."""
    best = cgutils.alloca_once(e.b, _I32V)
    e.b.store(ints(0), best)
    with cgutils.for_range(e.b, e.b.udiv(size, e.i64(LANES))) as loop:
        bits = e.load(x, e.scaled(loop.index, _VECTOR_BYTES), _I32V)
        bits, before = e.b.and_(bits, ints(0x7FFFFFFF)), e.b.load(best)
        e.b.store(e.b.select(e.b.icmp_unsigned(">", bits, before), bits, before), best)
    largest = call(e, "llvm.vector.reduce.umax.v16i32", _I32, [e.b.load(best)])
    return e.b.bitcast(largest, _F32)


@intrinsic
def round_query(
    typing_context: Any, x: Any, size: Any, num_groups: Any, bias: Any, out: Any
) -> Any:
    """16-bit levels of `size` float32, the biases of their products and their scale, at `out`
    (`query_bytes`). The scale is NaN if they are not finite. `bias`: what keys have added."""
    return result_of(types.void(*[types.int64] * 5), _emit_round_query)


def _emit_round_query(e: Emitter, arguments: Sequence[Any]) -> None:
    x, size, num_groups, bias, out = arguments
    b, largest = e.b, _largest_magnitude(e, x, size)
    one, levels = ir.Constant(_F32, 1.0), ir.Constant(_F32, float(MAX_QUERY_LEVEL))
    is_finite = b.fcmp_ordered("<", largest, ir.Constant(_F32, float(MAX_MAGNITUDE)))
    is_some = b.fcmp_ordered(">", largest, ir.Constant(_F32, float(MIN_SCALE)))
    has_levels = b.and_(is_finite, is_some)
    divisor = b.select(has_levels, largest, one)
    inverse = splat(e, b.fdiv(levels, divisor))
    group_vectors = b.udiv(b.udiv(size, num_groups), e.i64(LANES))
    with cgutils.for_range(b, num_groups) as groups:
        total = cgutils.alloca_once(b, _I32V)
        b.store(ints(0), total)
        with cgutils.for_range(b, group_vectors) as loop:
            index = b.add(b.mul(groups.index, group_vectors), loop.index)
            scaled = b.fmul(e.load(x, e.scaled(index, _VECTOR_BYTES), _F32V), inverse)
            shifted = b.fadd(scaled, e.constant(ROUND_MAGIC, scaled))
            level = b.sub(b.bitcast(shifted, _I32V), ints(ROUND_MAGIC_BITS))
            level = b.select(has_levels, level, ints(0))
            b.store(b.add(b.load(total), level), total)
            high = b.ashr(b.add(level, ints(128)), ints(8))
            place = e.scaled(index, LANES)
            for part, at in ((high, place), (level, b.add(size, place))):
                b.store(b.trunc(part, _I8V), e.pointer(out, at, _I8V), align=1)
        count = call(e, "llvm.vector.reduce.add.v16i32", _I32, [b.load(total)])
        product = b.mul(count, b.neg(b.trunc(bias, _I32)))
        biases, _ = query_places(e, size, num_groups)
        e.store(product, out, b.add(biases, e.scaled(groups.index, 4)))
    scale = b.select(has_levels, b.fdiv(divisor, levels), one)
    _, place = query_places(e, size, num_groups)
    e.store(b.select(is_finite, scale, ir.Constant(_F32, float("nan"))), out, place)
