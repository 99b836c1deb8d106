"""The same tiles with a matrix unit: Intel's AMX, up to 16 rows against a panel at a time.

The sums over a block are integers, so its results are those of `panel_simd.py` to the bit; the
additions after that are the same ones in the same order. Panels are unpacked into scratch memory
first, which is worth it for many rows: per block of 32 inputs

    values    [8 groups, 16 outputs, 4 inputs] bytes, as the unit takes them
    scales    [16] float32
    minima    [16] float32

See Intel's architecture manual, volume 1, chapter 18. Linux gives the unit's registers to processes
that ask for them.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.kernels import panel_simd
from engine.kernels.panel_matrix import BLOCK_INPUTS, PANEL_OUTPUTS, PanelForm
from engine.kernels.simd import LANES, Emitter, intrinsic, result_of

WIDE_ROWS = 16
HALF_WIDE_ROWS = 8
MAX_WIDE_PANELS = 4
UNPACKED_BYTES = PANEL_OUTPUTS * (BLOCK_INPUTS + 4 + 4)
"""Of a block."""

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
_SCALES_AT = PANEL_OUTPUTS * BLOCK_INPUTS
_VECTOR_BYTES = 4 * LANES
_GROUP = 3  # blocks
_PRODUCTS_BYTES = WIDE_ROWS * _VECTOR_BYTES

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_F32 = ir.FloatType()
_F32V, _I32V = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)

# The tile registers: activations, weights, products; the first and last for 16 rows and for 8.
_ROWS_OF = {WIDE_ROWS: (0, 2), HALF_WIDE_ROWS: (1, 3)}
_WEIGHTS = 4
_SHAPES = {0: (16, 32), 1: (8, 32), 2: (16, 64), 3: (8, 64), _WEIGHTS: (8, 64)}  # rows, bytes each


@cache
def has_matrix_unit() -> bool:
    """Whether this process may use it; asks the system for that the first time."""
    features = llvm.get_host_cpu_features()
    if not (features.get("amx-int8", False) and features.get("amx-tile", False)):
        return False
    if not (sys.platform == "linux" and platform.machine() == "x86_64"):
        return False
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    return bool(system_call(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def _call(e: Emitter, name: str, *arguments: Any) -> None:
    function_type = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(e.b.module, function_type, name)
    e.b.call(function, list(arguments))


def _tile_number(number: int) -> Any:
    return ir.Constant(_I8, number)


@intrinsic
def configure(typing_context: Any) -> Any:
    """Gives the calling thread's tile registers their shapes; before anything else here."""
    return result_of(types.void(), lambda e, _: emit_configure(e))


@intrinsic
def release(typing_context: Any) -> Any:
    """Clears the calling thread's tile registers, so that nobody has to keep them."""
    return result_of(types.void(), lambda e, _: _call(e, "llvm.x86.tilerelease"))


def emit_configure(e: Emitter) -> None:
    layout = bytearray(64)
    layout[0] = 1  # the palette
    for number, (num_rows, num_bytes) in _SHAPES.items():
        layout[16 + 2 * number : 18 + 2 * number] = num_bytes.to_bytes(2, "little")
        layout[48 + number] = num_rows
    place = cgutils.alloca_once(e.b, ir.ArrayType(_I8, len(layout)))
    e.b.store(ir.Constant(ir.ArrayType(_I8, len(layout)), layout), place)
    _call(e, "llvm.x86.ldtilecfg", e.b.bitcast(place, _I8.as_pointer()))


def emit_unpack(
    e: Emitter, form: PanelForm, panels: Any, num_panels: Any, num_blocks: Any, out: Any
) -> None:
    """Panels that follow each other, unpacked one after another at `out`; all int64.

    Block by block of all panels: several streams from memory are faster than one.
    """
    panel_bytes = e.scaled(num_blocks, form.block_bytes)
    unpacked_bytes = e.scaled(num_blocks, UNPACKED_BYTES)
    over = cgutils.for_range
    with over(e.b, num_blocks) as blocks, over(e.b, num_panels) as loop:
        block = e.b.add(panels, e.b.mul(loop.index, panel_bytes))
        block = e.b.add(block, e.scaled(blocks.index, form.block_bytes))
        place = e.b.add(out, e.b.mul(loop.index, unpacked_bytes))
        place = e.b.add(place, e.scaled(blocks.index, UNPACKED_BYTES))
        for i, vector in enumerate(panel_simd.emit_weights(e, block, form.bits)):
            e.store(vector, place, e.i64(_VECTOR_BYTES * i))
        scale, minimum = panel_simd.emit_scale_and_minimum(e, block, form)
        e.store(scale, place, e.i64(_SCALES_AT))
        e.store(minimum, place, e.i64(_SCALES_AT + _VECTOR_BYTES))


def emit_wide_tile(
    e: Emitter, num_rows: int, panels: Any, num_panels: Any, num_blocks: Any, levels: Any,
    scales: Any, sums: Any, out: Any, out_stride: Any,
) -> None:  # fmt: skip
    """out[r, 0 : 16 * panels] = 8 or 16 rows times up to `MAX_WIDE_PANELS` unpacked panels.

    Rows lie in tiles: `levels` [blocks, WIDE_ROWS, 32] int8, `scales` and `sums` [blocks,
    WIDE_ROWS] float32. Some blocks go through the unit first and are added up then, which keeps
    both busy.
    """
    over = cgutils.for_range
    unpacked_bytes = e.scaled(num_blocks, UNPACKED_BYTES)
    place = cgutils.alloca_once(e.b, ir.ArrayType(_I32V, MAX_WIDE_PANELS * _GROUP * WIDE_ROWS))
    place.align = _VECTOR_BYTES
    dump = e.b.ptrtoint(place, _I64)
    num_groups = e.b.udiv(e.b.add(num_blocks, e.i64(_GROUP - 1)), e.i64(_GROUP))
    with over(e.b, num_groups) as groups:
        first = e.scaled(groups.index, _GROUP)
        left = e.b.sub(num_blocks, first)
        count = e.b.select(e.b.icmp_unsigned("<", left, e.i64(_GROUP)), left, e.i64(_GROUP))
        with over(e.b, count) as blocks:
            block = e.b.add(first, blocks.index)
            _emit_multiply(e, num_rows, panels, num_panels, unpacked_bytes, block, blocks.index,
                           levels, dump)  # fmt: skip
        with over(e.b, num_panels) as loop:
            panel = e.b.add(panels, e.b.mul(loop.index, unpacked_bytes))
            column = e.b.add(out, e.scaled(loop.index, _VECTOR_BYTES))
            products = e.b.add(dump, e.scaled(loop.index, _GROUP * _PRODUCTS_BYTES))
            _emit_add_up(e, num_rows, panel, first, count, products, scales, sums, column,
                         out_stride)  # fmt: skip


def _emit_multiply(
    e: Emitter, num_rows: int, panels: Any, num_panels: Any, unpacked_bytes: Any, block: Any,
    index: Any, levels: Any, dump: Any,
) -> None:  # fmt: skip
    """A block's integer products with all panels, to their places in `dump`."""
    rows, products = (_tile_number(number) for number in _ROWS_OF[num_rows])
    weights, vector_bytes = _tile_number(_WEIGHTS), e.i64(_VECTOR_BYTES)
    inputs = e.pointer(levels, e.scaled(block, WIDE_ROWS * BLOCK_INPUTS), _I8)
    _call(e, "llvm.x86.tileloadd64", rows, inputs, e.i64(BLOCK_INPUTS))
    with cgutils.for_range(e.b, num_panels) as loop:
        panel = e.b.add(panels, e.b.mul(loop.index, unpacked_bytes))
        values = e.pointer(panel, e.scaled(block, UNPACKED_BYTES), _I8)
        at = e.b.add(e.scaled(loop.index, _GROUP), index)
        _call(e, "llvm.x86.tileloadd64", weights, values, vector_bytes)
        _call(e, "llvm.x86.tilezero", products)
        _call(e, "llvm.x86.tdpbsud", products, rows, weights)
        _call(e, "llvm.x86.tilestored64", products,
              e.pointer(dump, e.scaled(at, _PRODUCTS_BYTES), _I8), vector_bytes)  # fmt: skip


def _emit_add_up(
    e: Emitter, num_rows: int, panel: Any, first: Any, count: Any, products: Any, scales: Any,
    sums: Any, out: Any, out_stride: Any,
) -> None:  # fmt: skip
    """Adds some blocks of a panel to `out`; the first ones to zero."""
    is_first = e.b.icmp_unsigned("==", first, e.i64(0))
    zero = ir.Constant(_F32V, [0.0] * LANES)
    totals = [e.slot() for _ in range(num_rows)]
    for r, total in enumerate(totals):
        known = e.load(out, e.scaled(out_stride, r), _F32V)
        e.b.store(e.b.select(is_first, zero, known), total)
    with cgutils.for_range(e.b, count) as loop:
        block = e.b.add(first, loop.index)
        at = e.b.add(panel, e.scaled(block, UNPACKED_BYTES))
        scale = e.load(at, e.i64(_SCALES_AT), _F32V)
        minimum = e.load(at, e.i64(_SCALES_AT + _VECTOR_BYTES), _F32V)
        for r, total in enumerate(totals):
            place = e.b.add(e.scaled(loop.index, _PRODUCTS_BYTES), e.i64(_VECTOR_BYTES * r))
            row = e.b.add(e.scaled(block, 4 * WIDE_ROWS), e.i64(4 * r))
            panel_simd.emit_add_block(e, total, e.load(products, place, _I32V), scale, minimum,
                                      scales, sums, row)  # fmt: skip
    for r, total in enumerate(totals):
        e.store(e.b.load(total), out, e.scaled(out_stride, r))
