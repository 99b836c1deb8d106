"""All tiles (form x number of rows x number of panels) behind a few addresses.

They are compiled once and called through a pointer, since a compiler would otherwise take them in
again wherever they are called from: that alone took half a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba import types

from engine.kernels import panel_amx, panel_simd
from engine.kernels.compiled import compiled
from engine.kernels.panel_amx import HALF_WIDE_ROWS, WIDE_ROWS
from engine.kernels.panel_matrix import PANEL_FORMS
from engine.kernels.simd import Emitter, intrinsic, result_of

TILE_ROWS = 8
"""No tile reaches further than this, less one, past the last row."""

HAS_MATRIX_UNIT = panel_amx.has_matrix_unit()
MIN_WIDE_ROWS = 64
"""From so many rows on the matrix unit is faster, though panels are unpacked for it and a core
that uses it has a lower clock."""

_DOT = panel_simd.dot_product_kind()
# Vectors of 4 or 8 lanes need more registers for a tile than there are.
_MOST_ROWS = TILE_ROWS if _DOT == "avx512vnni" else 4
_PANELS_OF = {1: 4, 2: 4, 4: 4, 8: 1} if _DOT == "avx512vnni" else {1: 2, 2: 2, 4: 1, 8: 1}
"""The panels of a tile by its number of rows: as many streams from memory, which some CPUs read
faster than one, and others slower (`panel_streams.py`)."""

_SHAPES = tuple(dict.fromkeys([*((rows, 1) for rows in _PANELS_OF), *_PANELS_OF.items()]))
STREAMS = (1, max(_PANELS_OF.values()))
_PANELS_OF_ONE, _PANELS_OF_TWO, _PANELS_OF_FOUR, _PANELS_OF_EIGHT = _PANELS_OF.values()
_NARROW_ARGUMENTS, _WIDE_ARGUMENTS, _UNPACK_ARGUMENTS = 12, 9, 5


class Tiles(NamedTuple):
    """Addresses of compiled code; `unpack` and `wide` are 0 without a matrix unit.

    `streams`: one of STREAMS: 1 for tiles of one panel only, else several side by side.
    """

    narrow: int
    unpack: int
    wide: int
    streams: int = STREAMS[-1]


@compiled
def tile_rows(num_rows: int) -> int:
    """How many rows the next tile has when so many are left; it may reach past the last one."""
    if num_rows > 5:
        return _MOST_ROWS
    if num_rows > 2:
        return 4
    return num_rows


@compiled
def is_wide(num_rows: int) -> bool:
    """Whether a product with so many rows is the matrix unit's, and rows lie in tiles for it."""
    return HAS_MATRIX_UNIT and num_rows >= MIN_WIDE_ROWS


@compiled
def wide_tile_rows(num_rows: int) -> int:
    """The same for the matrix unit."""
    return WIDE_ROWS if num_rows > HALF_WIDE_ROWS else HALF_WIDE_ROWS


@compiled
def tile_panels(tiles: Tiles, num_rows: int) -> int:
    """How many panels a tile of so many rows has."""
    if tiles.streams == 1:
        return 1
    if num_rows == 1:
        return _PANELS_OF_ONE
    if num_rows == 2:
        return _PANELS_OF_TWO
    return _PANELS_OF_FOUR if num_rows == 4 else _PANELS_OF_EIGHT


def _signature(num_arguments: int) -> Any:
    return types.void(*[types.int64] * num_arguments)


def _emit_cases(e: Emitter, key: Any, cases: Sequence[tuple[int, Callable[[], None]]]) -> None:
    """Nothing for a key that has no case."""
    end = e.b.append_basic_block("end")
    switch = e.b.switch(key, end)
    for number, emit in cases:
        block = e.b.append_basic_block("case")
        switch.add_case(ir.Constant(ir.IntType(64), number), block)
        e.b.position_at_end(block)
        emit()
        e.b.branch(end)
    e.b.position_at_end(end)


def _shape_key(form: Any, num_rows: Any, num_panels: Any) -> Any:
    return (form * 16 + num_rows) * 8 + num_panels


@intrinsic
def _narrow_tile(
    typing_context: Any, key: Any, panel: Any, num_blocks: Any, levels: Any, stride: Any,
    scales: Any, sums: Any, scales_stride: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    def emit(e: Emitter, values: Sequence[Any]) -> None:
        def case(form: int, num_rows: int, num_panels: int) -> tuple[int, Callable[[], None]]:
            return _shape_key(form, num_rows, num_panels), lambda: panel_simd.emit_tile(
                e, num_rows, num_panels, PANEL_FORMS[form], _DOT, *values[1:]
            )

        shapes = [(form, *shape) for form in range(len(PANEL_FORMS)) for shape in _SHAPES]
        _emit_cases(e, values[0], [case(*shape) for shape in shapes])

    return result_of(_signature(10), emit)


@intrinsic
def _unpack(
    typing_context: Any, form: Any, panels: Any, num_panels: Any, num_blocks: Any, out: Any
) -> Any:
    def emit(e: Emitter, values: Sequence[Any]) -> None:
        def case(number: int) -> tuple[int, Callable[[], None]]:
            form = PANEL_FORMS[number]
            return number, lambda: panel_amx.emit_unpack(e, form, *values[1:])

        _emit_cases(e, values[0], [case(number) for number in range(len(PANEL_FORMS))])

    return result_of(_signature(_UNPACK_ARGUMENTS), emit)


@intrinsic
def _wide_tile(
    typing_context: Any, num_rows: Any, panels: Any, num_panels: Any, num_blocks: Any,
    levels: Any, scales: Any, sums: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    def emit(e: Emitter, values: Sequence[Any]) -> None:
        def case(num_rows: int) -> tuple[int, Callable[[], None]]:
            return num_rows, lambda: panel_amx.emit_wide_tile(e, num_rows, *values[1:])

        _emit_cases(e, values[0], [case(HALF_WIDE_ROWS), case(WIDE_ROWS)])

    return result_of(_signature(_WIDE_ARGUMENTS), emit)


def _run_narrow(
    form: int, count: int, panels: int, panel: int, num_blocks: int, levels: int, stride: int,
    scales: int, sums: int, scales_stride: int, out: int, out_stride: int,
) -> None:  # fmt: skip
    _narrow_tile((form * 16 + count) * 8 + panels, panel, num_blocks, levels, stride, scales, sums,
                 scales_stride, out, out_stride)  # fmt: skip


def _run_unpack(form: int, panels: int, num_panels: int, num_blocks: int, out: int) -> None:
    _unpack(form, panels, num_panels, num_blocks, out)


def _run_wide(
    count: int, panels: int, num_panels: int, num_blocks: int, levels: int, scales: int, sums: int,
    out: int, out_stride: int,
) -> None:  # fmt: skip
    _wide_tile(count, panels, num_panels, num_blocks, levels, scales, sums, out, out_stride)


@cache
def _compile(folder: str) -> tuple[Any, ...]:
    functions: list[tuple[Any, int]] = [(_run_narrow, _NARROW_ARGUMENTS)]
    if HAS_MATRIX_UNIT:
        functions += [(_run_unpack, _UNPACK_ARGUMENTS), (_run_wide, _WIDE_ARGUMENTS)]
    return tuple(
        numba.cfunc(_signature(count), cache=bool(folder))(function)
        for function, count in functions
    )


def compiled_tiles() -> Tiles:
    """Compiles them the first time, or loads them if kernels are cached (`kernel_cache.py`)."""
    addresses = [int(code.address) for code in _compile(vars(numba.config)["CACHE_DIR"])]
    narrow, unpack, wide = addresses if HAS_MATRIX_UNIT else (*addresses, 0, 0)
    return Tiles(narrow, unpack, wide)


def _call(num_arguments: int) -> tuple[Any, Any]:
    """An intrinsic's result: a call of the code at the first argument with the others."""

    def emit(e: Emitter, arguments: Sequence[Any]) -> None:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * num_arguments)
        e.b.call(e.b.inttoptr(arguments[0], kind.as_pointer()), list(arguments[1:]))

    return result_of(_signature(1 + num_arguments), emit)


@intrinsic
def run_tile(
    typing_context: Any, code: Any, form: Any, count: Any, panels: Any, panel: Any,
    num_blocks: Any, levels: Any, stride: Any, scales: Any, sums: Any, scales_stride: Any,
    out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """The tile of a form, `count` rows (1, 2, 4 or 8) and one panel or as many as `tile_panels`
    says; the rest as in `panel_simd.py`. `code`: `Tiles.narrow`."""
    return _call(_NARROW_ARGUMENTS)


@intrinsic
def unpack_panels(
    typing_context: Any, code: Any, form: Any, panels: Any, num_panels: Any, num_blocks: Any,
    out: Any,
) -> Any:  # fmt: skip
    """Panels that follow each other, for `run_wide_tile`. `code`: `Tiles.unpack`."""
    return _call(_UNPACK_ARGUMENTS)


@intrinsic
def run_wide_tile(
    typing_context: Any, code: Any, count: Any, panels: Any, num_panels: Any, num_blocks: Any,
    levels: Any, scales: Any, sums: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """`count` rows (8 or 16) times unpacked panels: `panel_amx.emit_wide_tile`. `code`:
    `Tiles.wide`."""
    return _call(_WIDE_ARGUMENTS)
