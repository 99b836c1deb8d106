"""Integer dot products over weight panels, and what feeds them, in LLVM's own vectors.

A tile is some rows of activations against one panel of 16 outputs. Activations are int8 with one
scale per block of 32 inputs; a block's products are summed as integers, which is exact in any
order, and the blocks are added up from the first to the last. So an output depends on its own row
and nothing else, to the bit, whatever tile it was computed in.
`panel_matrix.py` says how a panel lies in memory. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.kernels.dot_product import DOT_SIZE as _GROUP
from engine.kernels.dot_product import call as _call
from engine.kernels.dot_product import dot as _dot
from engine.kernels.dot_product import dot_product_kind as dot_product_kind
from engine.kernels.dot_product import ints as _ints
from engine.kernels.dot_product import splat as _splat
from engine.kernels.panel_matrix import BLOCK_INPUTS, PanelForm, PanelKind
from engine.kernels.simd import LANES, ROUND_MAGIC, ROUND_MAGIC_BITS, Emitter, intrinsic, result_of

_GROUPS = BLOCK_INPUTS // _GROUP
_VECTOR_BYTES = LANES * _GROUP
MAX_LEVEL = 127
_LINE_BYTES, _MANY_ROWS = 64, 8
_BESIDE_OTHERS, _ALONE = (4, 3), (16, 2)  # how panels of a tile are asked for ahead of time

_F16, _F32, _F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_F16V, _F32V = ir.VectorType(_F16, LANES), ir.VectorType(_F32, LANES)
_I8V, _I32V = ir.VectorType(_I8, LANES), ir.VectorType(_I32, LANES)


def emit_weights(e: Emitter, address: Any, bits: int) -> list[Any]:
    """A block's 8 vectors: vector j holds inputs 4 j to 4 j + 3 of 16 outputs, unsigned bytes."""
    if bits == 8:
        return [e.load(address, e.i64(_VECTOR_BYTES * j), _I32V, align=1) for j in range(_GROUPS)]
    low, high = [], []
    for j in range(_GROUPS // 2):
        packed = e.load(address, e.i64(_VECTOR_BYTES * j), _I32V, align=1)
        low.append(e.b.and_(packed, _ints(0x0F0F0F0F)))
        high.append(e.b.and_(e.b.lshr(packed, _ints(4)), _ints(0x0F0F0F0F)))
    return low + high


def emit_scale_and_minimum(e: Emitter, address: Any, form: PanelForm) -> tuple[Any, Any]:
    """Of a block's 16 outputs, as float32: an input's weight is scale * value + minimum."""
    at, narrow = form.values_bytes, LANES * 2
    if form.kind is PanelKind.WIDE:
        scale = e.load(address, e.i64(at), _F32V, align=1)
        return scale, e.load(address, e.i64(at + LANES * 4), _F32V, align=1)
    scale = e.b.fpext(e.load(address, e.i64(at), _F16V, align=1), _F32V)
    if form.kind is PanelKind.MINIMUM:
        minimum = e.load(address, e.i64(at + narrow), _F16V, align=1)
        return scale, e.b.fpext(minimum, _F32V)
    zero = e.load(address, e.i64(at + narrow), _I8V, align=1)
    return scale, e.b.fneg(e.b.fmul(scale, e.b.uitofp(zero, _F32V)))


def make_tile(form: PanelForm, kind: str, num_panels: int = 1) -> Any:
    @intrinsic
    def tile(
        typing_context: Any, rows: Any, panel: Any, num_blocks: Any, levels: Any,
        levels_stride: Any, scales: Any, sums: Any, scales_stride: Any, out: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        """out[r, 0 : 16 * panels] = rows of activations times panels that follow each other.

        `rows` is a tuple of their number. The rest are int64 addresses, strides in bytes and a
        count of blocks. `levels` int8, `scales` and `sums` float32 per row and block
        (`quantize_block`).
        """
        num_rows = len(rows)

        def emit(e: Emitter, values: Sequence[Any]) -> None:
            emit_tile(e, num_rows, num_panels, form, kind, *values[1:])

        return result_of(types.void(rows, *[types.int64] * 9), emit)

    return tile


def emit_tile(
    e: Emitter, num_rows: int, num_panels: int, form: PanelForm, kind: str, panel: Any,
    num_blocks: Any, levels: Any, levels_stride: Any, scales: Any, sums: Any, scales_stride: Any,
    out: Any, out_stride: Any,
) -> None:  # fmt: skip
    """Several panels side by side: a core reads memory faster in several streams than in one."""
    totals = [[e.slot() for _ in range(num_rows)] for _ in range(num_panels)]
    for total in (total for by_panel in totals for total in by_panel):
        e.b.store(ir.Constant(_F32V, [0.0] * LANES), total)
    panel_bytes = e.scaled(num_blocks, form.block_bytes)
    # Products of many rows take turns, so that none waits for itself; few have no registers to.
    rows_of_tile = range(num_rows)
    side_by_side = [rows_of_tile] if num_rows >= _MANY_ROWS else [[r] for r in rows_of_tile]
    with cgutils.for_range(e.b, num_blocks) as loop:
        block = e.b.add(panel, e.scaled(loop.index, form.block_bytes))
        for by_panel in totals:
            if num_panels > 1:
                emit_prefetch(e, block, form.block_bytes, *_BESIDE_OTHERS)
            elif num_rows > 1:  # one row alone is too fast for it, and the hardware asks ahead
                emit_prefetch(e, block, form.block_bytes, *_ALONE)
            vectors = emit_weights(e, block, form.bits)
            scale, minimum = emit_scale_and_minimum(e, block, form)
            for rows in side_by_side:
                products = emit_products(e, kind, vectors, levels, levels_stride, rows, loop.index)
                for r, product in zip(rows, products, strict=True):
                    row = e.b.add(e.scaled(loop.index, 4), e.scaled(scales_stride, r))
                    emit_add_block(e, by_panel[r], product, scale, minimum, scales, sums, row)
            block = e.b.add(block, panel_bytes)
    for p, by_panel in enumerate(totals):
        for r, total in enumerate(by_panel):
            place = e.b.add(e.scaled(out_stride, r), e.i64(_VECTOR_BYTES * p))
            e.store(e.b.load(total), out, place)


def emit_products(
    e: Emitter, kind: str, vectors: Sequence[Any], levels: Any, levels_stride: Any,
    rows: Sequence[int], block: Any,
) -> list[Any]:  # fmt: skip
    """The rows' integer products with a block of weights, in turn."""
    products = [_ints(0) for _ in rows]
    for j, vector in enumerate(vectors):
        for i, r in enumerate(rows):
            place = e.b.add(e.scaled(levels_stride, r), e.i64(_GROUP * j))
            place = e.b.add(e.scaled(block, BLOCK_INPUTS), place)
            group = e.load(levels, place, _I32, align=1)
            products[i] = _dot(e, kind, products[i], vector, _splat(e, group))
    return products


def emit_prefetch(e: Emitter, block: Any, num_bytes: int, ahead: int, locality: int) -> None:
    """Of the block that lies some further on; past the end of a panel it is the next one.

    `locality`: 3 into the first cache, 2 into the second one, which can wait for more at a time.
    """
    kinds = [_I8.as_pointer(), _I32, _I32, _I32]
    function_type = ir.FunctionType(ir.VoidType(), kinds)
    function = cgutils.get_or_insert_function(e.b.module, function_type, "llvm.prefetch.p0")
    arguments = [ir.Constant(_I32, number) for number in (0, locality, 1)]
    for line in range(0, num_bytes, _LINE_BYTES):
        place = e.pointer(block, e.i64(ahead * num_bytes + line), _I8)
        e.b.call(function, [place, *arguments])


def emit_add_block(
    e: Emitter, total: Any, products: Any, scale: Any, minimum: Any, scales: Any, sums: Any,
    row: Any,
) -> None:  # fmt: skip
    """total += scale * the row's scale * products + minimum * the row's sum, both at byte `row`."""
    by_row = e.b.fmul(scale, _splat(e, e.load(scales, row, _F32)))
    value = e.fma(e.b.sitofp(products, _F32V), by_row, e.b.load(total))
    e.b.store(e.fma(minimum, _splat(e, e.load(sums, row, _F32)), value), total)


@intrinsic
def quantize_block(typing_context: Any, x: Any, levels: Any, scale: Any, sum_: Any) -> Any:
    """32 float32 at address x → 32 int8 levels, their scale, and scale times their sum.

    A block with a NaN or an infinity gets the scale NaN, so that whatever it feeds is NaN.
    """
    return result_of(types.void(*[types.int64] * 4), _emit_quantize_block)


def _emit_quantize_block(e: Emitter, arguments: Sequence[Any]) -> None:
    x, levels, scale_at, sum_at = arguments
    parts = [e.load(x, e.i64(LANES * 4 * i), _F32V) for i in range(2)]
    largest, is_finite = _largest_magnitude(e, parts)
    is_zero = e.b.fcmp_ordered("==", largest, ir.Constant(_F32, 0.0))
    divisor = e.b.select(is_zero, ir.Constant(_F32, 1.0), largest)
    inverse = e.splat(e.b.fdiv(ir.Constant(_F32, float(MAX_LEVEL)), divisor))
    scale = e.b.fmul(largest, ir.Constant(_F32, 1.0 / MAX_LEVEL))
    scale = e.b.select(is_finite, scale, ir.Constant(_F32, float("nan")))
    total = _ints(0)
    for i, part in enumerate(parts):
        whole = _nearest_int(e, e.b.fmul(part, inverse))
        total = e.b.add(total, whole)
        e.b.store(e.b.trunc(whole, _I8V), e.pointer(levels, e.i64(LANES * i), _I8V), align=1)
    count = _call(e, "llvm.vector.reduce.add.v16i32", _I32, [total])
    e.store(scale, scale_at, e.i64(0))
    e.store(e.b.fmul(e.b.sitofp(count, _F32), scale), sum_at, e.i64(0))


def _largest_magnitude(e: Emitter, parts: Sequence[Any]) -> tuple[Any, Any]:
    """(the largest magnitude, whether all are finite): compared as integers, NaN is the largest."""
    bits = [e.b.and_(e.b.bitcast(part, _I32V), _ints(0x7FFFFFFF)) for part in parts]
    larger = e.b.select(e.b.icmp_unsigned(">", *bits), *bits)
    largest = _call(e, "llvm.vector.reduce.umax.v16i32", _I32, [larger])
    infinity = ir.Constant(_I32, 0x7F800000)
    return e.b.bitcast(largest, _F32), e.b.icmp_unsigned("<", largest, infinity)


def _nearest_int(e: Emitter, x: Any) -> Any:
    """Half to even, for magnitudes below 2 ** 22; anything for others."""
    shifted = e.b.fadd(x, e.constant(ROUND_MAGIC, x))
    return e.b.sub(e.b.bitcast(shifted, _I32V), _ints(ROUND_MAGIC_BITS))


@intrinsic
def sum_of_squares(typing_context: Any, x: Any, size: Any) -> Any:
    """Of float32 at address x; lane by lane first, then across the lanes, in order."""
    return result_of(types.float32(types.int64, types.int64), _emit_sum_of_squares)


def _emit_sum_of_squares(e: Emitter, arguments: Sequence[Any]) -> Any:
    x, size = arguments
    slot = e.slot()
    e.b.store(ir.Constant(_F32V, [0.0] * LANES), slot)
    with cgutils.for_range(e.b, e.b.udiv(size, e.i64(LANES))) as loop:
        value = e.load(x, e.scaled(loop.index, LANES * 4), _F32V)
        e.b.store(e.fma(value, value, e.b.load(slot)), slot)
    return e.reduce("fadd", e.b.load(slot), start=0.0)


Elementwise = Callable[[Emitter, Any, Any], Any]


def _make_gate(emit_gate: Elementwise) -> Any:
    @intrinsic
    def gate(typing_context: Any, gates: Any, ups: Any, out: Any) -> Any:
        """out = activation(gates) * ups: 16 float32 at each address."""

        def emit(e: Emitter, arguments: Sequence[Any]) -> None:
            first, second = (e.load(at, e.i64(0), _F32V) for at in arguments[:2])
            e.store(emit_gate(e, first, second), arguments[2], e.i64(0))

        return result_of(types.void(*[types.int64] * 3), emit)

    return gate


def _sigmoid_times(e: Emitter, factor: Any, x: Any) -> Any:
    """x / (1 + exp(-factor)), with the exponent bounded so that it neither is lost nor overflows;
    a NaN stays one."""
    limit = e.constant(87.0, factor)
    negative = e.b.fneg(factor)
    too_large = e.b.fcmp_ordered(">", negative, limit)
    power = e.exp(e.b.select(too_large, limit, negative))
    return e.b.fdiv(x, e.b.fadd(e.constant(1.0, power), power))


def _silu(e: Emitter, gate: Any, up: Any) -> Any:
    return e.b.fmul(_sigmoid_times(e, gate, gate), up)


def _gelu_tanh(e: Emitter, gate: Any, up: Any) -> Any:
    """0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x ** 3)."""
    square = e.b.fmul(gate, gate)
    inner = e.fma(square, e.constant(0.044715, gate), e.constant(1.0, gate))
    twice_u = e.b.fmul(e.b.fmul(gate, inner), e.constant(1.5957691216057308, gate))
    return e.b.fmul(_sigmoid_times(e, twice_u, gate), up)


gate_silu = _make_gate(_silu)
gate_gelu_tanh = _make_gate(_gelu_tanh)
