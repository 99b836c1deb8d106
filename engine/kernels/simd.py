"""Vector pieces that numba cannot spell, written once in LLVM's own vectors for x86 and ARM.

A vector has 16 lanes: one cache line of float32, and one KV block of 16 tokens. Every fused
multiply-add is explicit and no operation may be reordered, so a row's result depends on its own
numbers only and is the same to the bit for every number of rows worked on together: the base of
batch invariance. Addresses are plain integers (`array.ctypes.data`); nothing is bounds-checked.
Knows nothing of sequences, masks or block tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _numba_intrinsic

from engine.vector_sizes import INT4_GROUP_SIZE as INT4_GROUP_SIZE
from engine.vector_sizes import LANES as LANES

intrinsic: Any = _numba_intrinsic  # its own annotations describe the function before wrapping

RUN = 4 * LANES
"""Elements of a run: four independent vectors keep the units busy."""

_F32 = ir.FloatType()
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_F32V = ir.VectorType(_F32, LANES)
_I32V = ir.VectorType(_I32, LANES)

# exp(x) = 2 ** n * exp(r): Cephes' expf, |r| <= ln(2) / 2, relative error about 2e-7.
_EXP_UNDERFLOW = -87.0
LOG2_E, LN2_HIGH, LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
EXP_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
                   1.6666665459e-1, 5.0000001201e-1)  # fmt: skip
# tanh(x): Cephes' tanhf, a polynomial in x * x below this and 1 - 2 / (exp(2 x) + 1) above it.
TANH_SMALL, TANH_ONE = 0.625, 9.1
TANH_POLYNOMIAL = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1,
                    -3.33332819422e-1)  # fmt: skip
ROUND_MAGIC, ROUND_MAGIC_BITS = 12582912.0, 0x4B400000


class Emitter:
    """Shorthand over an IR builder for float32 vectors (or scalars) at integer addresses."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def pointer(self, address: Any, offset: Any, pointee: Any) -> Any:
        return self.b.inttoptr(self.b.add(address, offset), pointee.as_pointer())

    def load(self, address: Any, offset: Any, pointee: Any, align: int = 4) -> Any:
        return self.b.load(self.pointer(address, offset, pointee), align=align)

    def store(self, value: Any, address: Any, offset: Any) -> None:
        self.b.store(value, self.pointer(address, offset, value.type), align=4)

    def slot(self) -> Any:
        """A vector variable; the optimizer keeps it in a register."""
        return cgutils.alloca_once(self.b, _F32V)

    def i64(self, value: int) -> Any:
        return ir.Constant(_I64, value)

    def scaled(self, index: Any, factor: int) -> Any:
        return self.b.mul(index, self.i64(factor))

    def splat(self, scalar: Any) -> Any:
        undefined = ir.Constant(_F32V, ir.Undefined)
        first = self.b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        zeros = ir.Constant(_I32V, [0] * LANES)
        return self.b.shuffle_vector(first, undefined, zeros)

    def constant(self, value: float, like: Any) -> Any:
        vector = isinstance(like.type, ir.VectorType)
        return ir.Constant(like.type, [value] * LANES if vector else value)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        kind = a.type
        name = "llvm.fma.v16f32" if isinstance(kind, ir.VectorType) else "llvm.fma.f32"
        function_type = ir.FunctionType(kind, [kind] * 3)
        function = cgutils.get_or_insert_function(self.b.module, function_type, name)
        return self.b.call(function, [a, b, c])

    def reduce(self, operation: str, vector: Any, start: float | None = None) -> Any:
        """Across the lanes, in lane order where the order matters."""
        arguments = [vector] if start is None else [ir.Constant(_F32, start), vector]
        function_type = ir.FunctionType(_F32, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(
            self.b.module, function_type, f"llvm.vector.reduce.{operation}.v16f32"
        )
        return self.b.call(function, arguments)

    def exp(self, x: Any) -> Any:
        """exp(x) for x <= 88; exactly 0 below -87 (and for -inf), exactly 1 at 0, NaN for NaN."""
        b = self.b
        underflow = self.constant(_EXP_UNDERFLOW, x)
        is_zero = b.fcmp_ordered("<", x, underflow)
        x = b.select(is_zero, underflow, x)
        magic = self.constant(ROUND_MAGIC, x)
        shifted = self.fma(x, self.constant(LOG2_E, x), magic)
        n = b.fsub(shifted, magic)
        r = self.fma(n, self.constant(-LN2_HIGH, x), x)
        r = self.fma(n, self.constant(-LN2_LOW, x), r)
        p = self.constant(EXP_POLYNOMIAL[0], x)
        for coefficient in EXP_POLYNOMIAL[1:]:
            p = self.fma(p, r, self.constant(coefficient, x))
        p = b.fadd(self.fma(b.fmul(p, r), r, r), self.constant(1.0, x))
        return b.select(is_zero, self.constant(0.0, x), b.fmul(p, self._power_of_two(shifted)))

    def tanh(self, x: Any) -> Any:
        """Of a vector; NaN for NaN, relative error about 2e-7."""
        b, one = self.b, self.constant(1.0, x)
        size = b.bitcast(
            b.and_(b.bitcast(x, _I32V), ir.Constant(_I32V, [0x7FFFFFFF] * LANES)), _F32V
        )
        bounded = b.select(b.fcmp_ordered(">", size, self.constant(TANH_ONE, x)),
                           self.constant(TANH_ONE, x), size)  # fmt: skip
        grown = b.fadd(self.exp(b.fadd(bounded, bounded)), one)
        large = b.fsub(one, b.fdiv(self.constant(2.0, x), grown))
        square = b.fmul(x, x)
        p = self.constant(TANH_POLYNOMIAL[0], x)
        for coefficient in TANH_POLYNOMIAL[1:]:
            p = self.fma(p, square, self.constant(coefficient, x))
        small = self.fma(b.fmul(p, square), x, x)
        is_negative = b.fcmp_ordered("<", x, self.constant(0.0, x))
        signed = b.select(is_negative, b.fsub(self.constant(0.0, x), large), large)
        return b.select(b.fcmp_ordered("<", size, self.constant(TANH_SMALL, x)), small, signed)

    def _power_of_two(self, shifted: Any) -> Any:
        """2 ** n, from the float whose low bits hold n after the rounding trick."""
        vector = isinstance(shifted.type, ir.VectorType)
        kind = _I32V if vector else _I32

        def constant(value: int) -> Any:
            return ir.Constant(kind, [value] * LANES if vector else value)

        n = self.b.sub(self.b.bitcast(shifted, kind), constant(ROUND_MAGIC_BITS))
        exponent = self.b.shl(self.b.add(n, constant(127)), constant(23))
        return self.b.bitcast(exponent, shifted.type)


Emit = Callable[[Emitter, Sequence[Any]], Any]


def _scalar_kind(kind: Any) -> Any:
    return types.float32 if kind in types.real_domain else types.int64


def result_of(signature: Any, emit: Emit) -> tuple[Any, Any]:
    """What a numba intrinsic returns: its signature and its code generator."""

    def generate(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        returned = emit(Emitter(builder), values)
        return context.get_dummy_value() if returned is None else returned

    return signature, generate


def _block_result(rows: Any, emit: Callable[..., None]) -> tuple[Any, Any]:
    def generate(e: Emitter, values: Sequence[Any]) -> None:
        emit(e, len(rows), *values[1:])

    return result_of(types.void(rows, *[types.int64] * 7), generate)


def _accumulators(e: Emitter, num_rows: int) -> list[Any]:
    zero = ir.Constant(_F32V, [0.0] * LANES)
    slots = []
    for _ in range(num_rows):
        slot = e.slot()
        e.b.store(zero, slot)
        slots.append(slot)
    return slots


def _multiply_rows(
    e: Emitter, slots: list[Any], address: Any, stride: Any, offset: Any, vector: Any
) -> None:
    """slots[r] += scalar at (address + r * stride + offset) * vector, for every row r."""
    for r, slot in enumerate(slots):
        scalar = e.load(address, e.b.add(e.scaled(stride, r), offset), _F32)
        e.b.store(e.fma(e.splat(scalar), vector, e.b.load(slot)), slot)


@intrinsic
def scores(
    typing_context: Any, rows: Any, q: Any, q_stride: Any, keys: Any, scales: Any,
    head_size: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """out[r, t] = sum_d q[r, d] * key[d, t] * scale[t]: queries against one block of 16 keys.

    `rows` is a tuple with one element per query: its type chooses the code. The rest are int64:
    addresses, strides in bytes, sizes in elements. Keys are float32 [head_size, 16], so that a
    vector holds one dimension of every token.
    """
    return _block_result(rows, _emit_scores)


def _emit_scores(
    e: Emitter, num_rows: int, q: Any, q_stride: Any, keys: Any, scales: Any, head_size: Any,
    out: Any, out_stride: Any,
) -> None:  # fmt: skip
    slots = _accumulators(e, num_rows)
    with cgutils.for_range(e.b, head_size) as loop:
        key = e.load(keys, e.scaled(loop.index, LANES * 4), _F32V)
        _multiply_rows(e, slots, q, q_stride, e.scaled(loop.index, 4), key)
    scale = e.load(scales, e.i64(0), _F32V)
    for r, slot in enumerate(slots):
        e.store(e.b.fmul(e.b.load(slot), scale), out, e.scaled(out_stride, r))


@intrinsic
def weighted_sum(
    typing_context: Any, rows: Any, p: Any, p_stride: Any, values: Any, scales: Any,
    head_size: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """out[r, d] += sum_t p[r, t] * value[t, d] * scale[t], t in 0..15 in order.

    Arguments as in `scores`. Values are float32 [16, head_size], head_size a multiple of 16.
    """
    return _block_result(rows, _emit_weighted_sum)


def _emit_weighted_sum(
    e: Emitter, num_rows: int, p: Any, p_stride: Any, values: Any, scales: Any, head_size: Any,
    out: Any, out_stride: Any,
) -> None:  # fmt: skip
    with cgutils.for_range(e.b, e.b.udiv(head_size, e.i64(LANES))) as chunks:
        start = e.scaled(chunks.index, LANES * 4)
        places = [e.b.add(start, e.scaled(out_stride, r)) for r in range(num_rows)]
        slots = _accumulators(e, num_rows)
        for slot, place in zip(slots, places, strict=True):
            e.b.store(e.load(out, place, _F32V), slot)
        with cgutils.for_range(e.b, e.i64(LANES)) as tokens:
            index = e.b.add(e.b.mul(tokens.index, head_size), e.scaled(chunks.index, LANES))
            value = e.load(values, e.scaled(index, 4), _F32V)
            scale = e.splat(e.load(scales, e.scaled(tokens.index, 4), _F32))
            place = e.scaled(tokens.index, 4)
            _multiply_rows(e, slots, p, p_stride, place, e.b.fmul(value, scale))
        for slot, place in zip(slots, places, strict=True):
            e.store(e.b.load(slot), out, place)


@intrinsic
def row_max(typing_context: Any, row: Any, num_vectors: Any) -> Any:
    """row_max(address, number of vectors) -> the largest float32, NaNs passed over."""
    return result_of(types.float32(_scalar_kind(row), _scalar_kind(num_vectors)), _emit_row_max)


@intrinsic
def row_exp(typing_context: Any, row: Any, num_vectors: Any, shift: Any) -> Any:
    """row_exp(address, number of vectors, shift): row = exp(row - shift) -> their sum."""
    kinds = (_scalar_kind(row), _scalar_kind(num_vectors), types.float32)
    return result_of(types.float32(*kinds), _emit_row_exp)


@intrinsic
def row_softcap(typing_context: Any, row: Any, num_vectors: Any, cap: Any) -> Any:
    """row_softcap(address, number of vectors, cap): row = cap * tanh(row / cap)."""
    kinds = (_scalar_kind(row), _scalar_kind(num_vectors), types.float32)
    return result_of(types.void(*kinds), _emit_row_softcap)


@intrinsic
def exp(typing_context: Any, x: Any) -> Any:
    """exp(x) -> the same exponential as `row_exp`, for one float32."""
    return result_of(types.float32(types.float32), lambda e, arguments: e.exp(arguments[0]))


def _emit_row_max(e: Emitter, arguments: Sequence[Any]) -> Any:
    row, num_vectors = arguments
    slot = e.slot()
    e.b.store(ir.Constant(_F32V, [float("-inf")] * LANES), slot)
    with cgutils.for_range(e.b, num_vectors) as loop:
        value = e.load(row, e.scaled(loop.index, LANES * 4), _F32V)
        best = e.b.load(slot)
        e.b.store(e.b.select(e.b.fcmp_ordered(">", value, best), value, best), slot)
    return e.reduce("fmax", e.b.load(slot))


def _emit_row_softcap(e: Emitter, arguments: Sequence[Any]) -> None:
    row, num_vectors, cap = arguments
    caps = e.splat(cap)
    with cgutils.for_range(e.b, num_vectors) as loop:
        offset = e.scaled(loop.index, LANES * 4)
        value = e.tanh(e.b.fdiv(e.load(row, offset, _F32V), caps))
        e.store(e.b.fmul(value, caps), row, offset)


def _emit_row_exp(e: Emitter, arguments: Sequence[Any]) -> Any:
    row, num_vectors, shift = arguments
    (total,) = _accumulators(e, 1)
    with cgutils.for_range(e.b, num_vectors) as loop:
        offset = e.scaled(loop.index, LANES * 4)
        value = e.exp(e.b.fsub(e.load(row, offset, _F32V), e.splat(shift)))
        e.store(value, row, offset)
        e.b.store(e.b.fadd(e.b.load(total), value), total)
    return e.reduce("fadd", e.b.load(total), start=0.0)


@intrinsic
def run_maxima(typing_context: Any, row: Any, num_runs: Any, out: Any) -> Any:
    """run_maxima(address, number of runs of 64, address out): the largest float32 of each run.

    A NaN counts as +inf, so that it cannot hide.
    """
    kinds = (_scalar_kind(row), _scalar_kind(num_runs), _scalar_kind(out))
    return result_of(types.void(*kinds), _emit_run_maxima)


@intrinsic
def run_masses(
    typing_context: Any, row: Any, num_runs: Any, shift: Any, factor: Any, out: Any
) -> Any:
    """run_masses(address, number of runs of 64, shift, factor, address out).

    The sum of exp((row - shift) * factor) over each run, float32; the row stays as it is.
    """
    kinds = (
        _scalar_kind(row), _scalar_kind(num_runs), types.float32, types.float32, _scalar_kind(out),
    )  # fmt: skip
    return result_of(types.void(*kinds), _emit_run_masses)


def _run_vectors(e: Emitter, row: Any, index: Any) -> list[Any]:
    start = e.scaled(index, RUN * 4)
    offsets = (e.b.add(start, e.i64(i * LANES * 4)) for i in range(RUN // LANES))
    return [e.load(row, offset, _F32V) for offset in offsets]


def larger(e: Emitter, a: Any, b: Any) -> Any:
    return e.b.select(e.b.fcmp_ordered(">", a, b), a, b)


def add(e: Emitter, a: Any, b: Any) -> Any:
    return e.b.fadd(a, b)


def fold(e: Emitter, vector: Any, combine: Callable[[Emitter, Any, Any], Any]) -> Any:
    """Across the lanes by halves: a fixed order, and a fourth of the steps of one by one."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (
            e.b.shuffle_vector(
                vector, vector, ir.Constant(ir.VectorType(_I32, width), [*range(at, at + width)])
            )
            for at in (0, width)
        )
        vector = combine(e, low, high)
    return e.b.extract_element(vector, ir.Constant(_I32, 0))


def _emit_run_maxima(e: Emitter, arguments: Sequence[Any]) -> None:
    row, num_runs, out = arguments
    infinite = ir.Constant(_F32V, [float("inf")] * LANES)
    with cgutils.for_range(e.b, num_runs) as loop:
        best = None
        for value in _run_vectors(e, row, loop.index):
            known = e.b.select(e.b.fcmp_unordered("uno", value, value), infinite, value)
            best = known if best is None else larger(e, known, best)
        e.store(fold(e, best, larger), out, e.scaled(loop.index, 4))


def _emit_run_masses(e: Emitter, arguments: Sequence[Any]) -> None:
    row, num_runs, shift, factor, out = arguments
    with cgutils.for_range(e.b, num_runs) as loop:
        total = None
        for value in _run_vectors(e, row, loop.index):
            scaled = e.b.fmul(e.b.fsub(value, e.splat(shift)), e.splat(factor))
            mass = e.exp(scaled)
            total = mass if total is None else e.b.fadd(total, mass)
        e.store(fold(e, total, add), out, e.scaled(loop.index, 4))
