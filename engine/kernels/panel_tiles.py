"""All tiles (form x number of rows) behind one address.

They are compiled once and called through a pointer, since a compiler would otherwise take them in
again wherever they are called from: that alone took half a minute.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numba
from llvmlite import ir
from numba import types

from engine.kernels import panel_simd
from engine.kernels.panel_matrix import PANEL_FORMS
from engine.kernels.simd import Emitter, intrinsic, result_of

TILE_ROWS = 8

# Vectors of 4 or 8 lanes need more registers for a tile than there are.
_MOST_ROWS = TILE_ROWS if panel_simd.dot_product_kind() == "avx512vnni" else 4
_4BIT_ZERO, _4BIT_MINIMUM, _4BIT_WIDE, _8BIT_ZERO, _8BIT_WIDE = range(len(PANEL_FORMS))
_ONE, _TWO, _FOUR, _EIGHT = (0,), (0,) * 2, (0,) * 4, (0,) * TILE_ROWS
_NUM_ARGUMENTS = 11
_SIGNATURE = types.void(*[types.int64] * _NUM_ARGUMENTS)
_compiled: Any = numba.njit(nogil=True)


@_compiled
def tile_rows(num_rows: int) -> int:
    """How many rows the next tile has when so many are left; it may reach past the last one."""
    if num_rows > 5:
        return _MOST_ROWS
    if num_rows > 2:
        return 4
    return num_rows


@_compiled
def _of_form(
    count: Any, form: Any, panel: Any, num_blocks: Any, levels: Any, stride: Any, scales: Any,
    sums: Any, scales_stride: Any, out: Any, out_stride: Any,
) -> None:  # fmt: skip
    """`count` is a tuple of as many elements as the tile has rows: its type chooses the code."""
    if form == _4BIT_ZERO:
        panel_simd.tile_4bit_zero(
            count, panel, num_blocks, levels, stride, scales, sums, scales_stride, out, out_stride
        )
    elif form == _4BIT_MINIMUM:
        panel_simd.tile_4bit_minimum(
            count, panel, num_blocks, levels, stride, scales, sums, scales_stride, out, out_stride
        )
    elif form == _4BIT_WIDE:
        panel_simd.tile_4bit_wide(
            count, panel, num_blocks, levels, stride, scales, sums, scales_stride, out, out_stride
        )
    elif form == _8BIT_ZERO:
        panel_simd.tile_8bit_zero(
            count, panel, num_blocks, levels, stride, scales, sums, scales_stride, out, out_stride
        )
    else:
        panel_simd.tile_8bit_wide(
            count, panel, num_blocks, levels, stride, scales, sums, scales_stride, out, out_stride
        )


def _tile(
    form: int, count: int, panel: int, num_blocks: int, levels: int, stride: int, scales: int,
    sums: int, scales_stride: int, out: int, out_stride: int,
) -> None:  # fmt: skip
    if count == TILE_ROWS:
        _of_form(_EIGHT, form, panel, num_blocks, levels, stride, scales, sums, scales_stride, out,
                 out_stride)  # fmt: skip
    elif count == 4:
        _of_form(_FOUR, form, panel, num_blocks, levels, stride, scales, sums, scales_stride, out,
                 out_stride)  # fmt: skip
    elif count == 2:
        _of_form(_TWO, form, panel, num_blocks, levels, stride, scales, sums, scales_stride, out,
                 out_stride)  # fmt: skip
    else:
        _of_form(_ONE, form, panel, num_blocks, levels, stride, scales, sums, scales_stride, out,
                 out_stride)  # fmt: skip


@cache
def _compile(folder: str) -> Any:
    return numba.cfunc(_SIGNATURE, cache=bool(folder))(_tile)


def tiles_address() -> int:
    """Compiles them the first time, or loads them if kernels are cached (`kernel_cache.py`)."""
    return int(_compile(vars(numba.config)["CACHE_DIR"]).address)


@intrinsic
def run_tile(
    typing_context: Any, tiles: Any, form: Any, count: Any, panel: Any, num_blocks: Any,
    levels: Any, stride: Any, scales: Any, sums: Any, scales_stride: Any, out: Any,
    out_stride: Any,
) -> Any:  # fmt: skip
    """The tile of a form and a number of rows (1, 2, 4 or 8); the rest as in `panel_simd.py`.

    `tiles`: what `tiles_address` returned.
    """

    def emit(e: Emitter, arguments: Sequence[Any]) -> None:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * _NUM_ARGUMENTS)
        e.b.call(e.b.inttoptr(arguments[0], kind.as_pointer()), list(arguments[1:]))

    return result_of(types.void(*[types.int64] * (1 + _NUM_ARGUMENTS)), emit)
