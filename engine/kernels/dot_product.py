"""Dot products of bytes in LLVM's own vectors: four products a lane, summed as integers.

An integer sum is exact in any order, so what is built on it does not depend on the instruction:
`avx512vnni`, `avxvnni`, `i8mm` (ARM), or `none`, which is plain arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from engine.kernels.simd import LANES, Emitter

DOT_SIZE = 4  # products of one dot-product instruction, in one 32-bit lane

_I8X16, _I32X4, _I32X8 = (
    ir.VectorType(ir.IntType(bits), count) for bits, count in ((8, 16), (32, 4), (32, 8))
)
_I32 = ir.IntType(32)
_I32V = ir.VectorType(_I32, LANES)


def _has(*features: str) -> bool:
    host = llvm.get_host_cpu_features()
    return all(host.get(feature, False) for feature in features)


def dot_product_kind() -> str:
    """The dot-product instruction of this machine: `avx512vnni`, `avxvnni`, `i8mm` or `none`."""
    if _has("avx512vnni", "avx512f"):
        return "avx512vnni"
    if _has("avxvnni"):
        return "avxvnni"
    if _has("i8mm"):
        return "i8mm"
    return "none"


def ints(value: int) -> Any:
    return ir.Constant(_I32V, [value] * LANES)


def call(e: Emitter, name: str, returned: Any, arguments: Sequence[Any]) -> Any:
    function_type = ir.FunctionType(returned, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(e.b.module, function_type, name)
    return e.b.call(function, list(arguments))


def splat(e: Emitter, scalar: Any) -> Any:
    kind = ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(kind, ir.Undefined)
    first = e.b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return e.b.shuffle_vector(first, undefined, ints(0))


def _part(e: Emitter, vector: Any, start: int, count: int) -> Any:
    mask = ir.Constant(ir.VectorType(_I32, count), list(range(start, start + count)))
    return e.b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _join(e: Emitter, parts: Sequence[Any]) -> Any:
    """Vectors of equal length one after another."""
    while len(parts) > 1:
        count = parts[0].type.count
        mask = ir.Constant(ir.VectorType(_I32, 2 * count), list(range(2 * count)))
        parts = [e.b.shuffle_vector(parts[i], parts[i + 1], mask) for i in range(0, len(parts), 2)]
    return parts[0]


def dot(e: Emitter, kind: str, total: Any, unsigned: Any, signed: Any) -> Any:
    """total[lane] += the sum of 4 products: bytes of `unsigned` times bytes of `signed`."""
    if kind == "avx512vnni":
        name = "llvm.x86.avx512.vpdpbusd.512"
        return call(e, name, _I32V, [total, unsigned, signed])
    if kind == "avxvnni":
        halves = [[_part(e, v, at, 8) for v in (total, unsigned, signed)] for at in (0, 8)]
        name = "llvm.x86.avx512.vpdpbusd.256"
        return _join(e, [call(e, name, _I32X8, half) for half in halves])
    if kind == "i8mm":
        return _join(e, [_dot_i8mm(e, total, unsigned, signed, at) for at in range(0, LANES, 4)])
    return _dot_plain(e, total, unsigned, signed)


def _dot_i8mm(e: Emitter, total: Any, unsigned: Any, signed: Any, at: int) -> Any:
    sums, u, s = (_part(e, vector, at, 4) for vector in (total, unsigned, signed))
    arguments = [sums, e.b.bitcast(u, _I8X16), e.b.bitcast(s, _I8X16)]
    return call(e, "llvm.aarch64.neon.usdot.v4i32.v16i8", _I32X4, arguments)


def _dot_plain(e: Emitter, total: Any, unsigned: Any, signed: Any) -> Any:
    for i in range(DOT_SIZE):
        u = e.b.and_(e.b.lshr(unsigned, ints(8 * i)), ints(255))
        s = e.b.ashr(e.b.shl(signed, ints(24 - 8 * i)), ints(24))
        total = e.b.add(total, e.b.mul(u, s))
    return total
