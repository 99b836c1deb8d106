"""Rows of activations times a matrix of panels, on a team of threads; and how rows are quantized.

Threads take chunks of panels (16 outputs each) in turn, so that a slow core does less. No output
depends on who computed it. Knows arrays only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from engine.kernels import panel_simd
from engine.kernels.compiled import compiled
from engine.kernels.panel_amx import UNPACKED_BYTES, WIDE_ROWS, configure, release
from engine.kernels.panel_matrix import BLOCK_INPUTS, PANEL_FORMS
from engine.kernels.panel_matrix import PANEL_OUTPUTS as OUTPUTS
from engine.kernels.panel_tiles import (
    Tiles,
    is_wide,
    run_tile,
    run_wide_tile,
    tile_panels,
    tile_rows,
    unpack_panels,
    wide_tile_rows,
)
from engine.kernels.thread_team import Turns, next_item, num_chunks

# Columns of a matrix, a row of int64.
ADDRESS, FORM, NUM_PANELS, NUM_BLOCKS, BIAS, MATRIX_COLUMNS = range(6)
NONE = -1

SILU, GELU_TANH = range(2)

_BLOCK_BYTES = tuple(form.block_bytes for form in PANEL_FORMS)
CHUNK_PANELS = 4
WIDE_CHUNK_PANELS = 3  # less to wait for at the end
GATED_COLUMNS = 2 * CHUNK_PANELS * OUTPUTS


class Rows(NamedTuple):
    """Activations in 8 bits: `levels` [T, K] int8, `scales` and `sums` [T, K / 32] float32.

    Of a product that `is_wide` they lie in tiles of 16 rows: `levels` [T / 16, K / 32, 16, 32],
    `scales` and `sums` [T / 16, K / 32, 16].
    """

    levels: Any
    scales: Any
    sums: Any


@compiled
def prepare(
    tiles: Tiles, matrix: Any, first: int, last: int, num_rows: int, scratch: Any, at: int
) -> int:
    """Panels `first` to `last` - 1 for `multiply`: the address of their unpacked form, or 0.

    They are unpacked at byte `at` of `scratch` for the matrix unit, if there is one and enough
    rows for it. `finish` must follow.
    """
    if not is_wide(num_rows):
        return 0
    configure()
    num_blocks, form = matrix[NUM_BLOCKS], matrix[FORM]
    address = matrix[ADDRESS] + first * num_blocks * _BLOCK_BYTES[form]
    place = scratch.ctypes.data + at
    unpack_panels(tiles.unpack, form, address, last - first, num_blocks, place)
    return int(place)


@compiled
def finish(num_rows: int) -> None:
    """The calling thread has multiplied all that it prepared."""
    if is_wide(num_rows):
        release()


@compiled
def multiply(
    tiles: Tiles, matrix: Any, first: int, last: int, unpacked: int, x: Rows, row: int,
    num_rows: int, out: Any, out_row: int, column: int,
) -> int:  # fmt: skip
    """Some rows of `x`, from `row` on, times panels `first` to `last` - 1; how many it did.

    They go to out[out_row:, column:]. A tile that is not full also writes rows past the last one.
    `unpacked`: what `prepare` returned.
    """
    num_blocks, form, out_stride = matrix[NUM_BLOCKS], matrix[FORM], out.strides[0]
    levels, stride = x.levels[row].ctypes.data, x.levels.strides[0]
    scales, sums = x.scales[row].ctypes.data, x.sums[row].ctypes.data
    place = out[out_row].ctypes.data + 4 * column
    if unpacked != 0:
        count = wide_tile_rows(num_rows)
        run_wide_tile(
            tiles.wide, count, unpacked, last - first, num_blocks, levels, scales, sums, place,
            out_stride,
        )  # fmt: skip
        return min(count, num_rows)
    panel_bytes = num_blocks * _BLOCK_BYTES[form]
    address = matrix[ADDRESS] + first * panel_bytes
    count = tile_rows(num_rows)
    step, i = tile_panels(tiles, count), 0
    while i + step <= last - first:
        run_tile(
            tiles.narrow, form, count, step, address + i * panel_bytes, num_blocks, levels, stride,
            scales, sums, x.scales.strides[0], place + 4 * OUTPUTS * i, out_stride,
        )  # fmt: skip
        i += step
    while i < last - first:
        run_tile(
            tiles.narrow, form, count, 1, address + i * panel_bytes, num_blocks, levels, stride,
            scales, sums, x.scales.strides[0], place + 4 * OUTPUTS * i, out_stride,
        )  # fmt: skip
        i += 1
    return min(count, num_rows)


@compiled
def _chunk_panels(num_rows: int) -> int:
    return WIDE_CHUNK_PANELS if is_wide(num_rows) else CHUNK_PANELS


@compiled
def product_chunks(matrix: Any, num_rows: int) -> int:
    """The items of `project`."""
    return num_chunks(matrix[NUM_PANELS], _chunk_panels(num_rows))


@compiled
def gated_chunks(matrix: Any) -> int:
    """The items of `project_gated`."""
    return num_chunks(matrix[NUM_PANELS] // 2, CHUNK_PANELS)


@compiled
def project(
    tiles: Tiles, matrix: Any, vectors: Any, x: Rows, num_rows: int, out: Any, turns: Turns,
    scratch: Any,
) -> int:  # fmt: skip
    """out = x times the matrix, plus its bias: how many of `product_chunks` this thread did."""
    num_panels, bias, num_done = matrix[NUM_PANELS], matrix[BIAS], 0
    size, num_items = _chunk_panels(num_rows), product_chunks(matrix, num_rows)
    item = next_item(turns, 0, num_items)
    while item.number >= 0:
        first = item.number * size
        last = min(first + size, num_panels)
        unpacked = prepare(tiles, matrix, first, last, num_rows, scratch, 0)
        row = 0
        while row < num_rows:
            row += multiply(
                tiles, matrix, first, last, unpacked, x, row, num_rows - row, out, row,
                first * OUTPUTS,
            )  # fmt: skip
        if bias != NONE:
            for row in range(num_rows):
                for i in range(first * OUTPUTS, last * OUTPUTS):
                    out[row, i] += vectors[bias + i]
        num_done += 1
        item = next_item(turns, item.stretch, num_items)
    finish(num_rows)
    return num_done


@compiled
def _gate(gates: Any, ups: Any, activation: int) -> None:
    """gates = activation(gates) * ups."""
    for start in range(0, gates.shape[0], OUTPUTS):
        gate, up = gates.ctypes.data + 4 * start, ups.ctypes.data + 4 * start
        if activation == SILU:
            panel_simd.gate_silu(gate, up, gate)
        else:
            panel_simd.gate_gelu_tanh(gate, up, gate)


@compiled
def project_gated(
    tiles: Tiles, matrix: Any, vectors: Any, activation: int, x: Rows, num_rows: int, tile: Any,
    out: Rows, turns: Turns, scratch: Any,
) -> int:  # fmt: skip
    """out = activation(gate) * up, quantized, a chunk of panels of each at a time.

    How many of `gated_chunks` this thread did.
    """
    half, bias, num_done = matrix[NUM_PANELS] // 2, matrix[BIAS], 0
    room, num_items = CHUNK_PANELS * matrix[NUM_BLOCKS] * UNPACKED_BYTES, gated_chunks(matrix)
    item = next_item(turns, 0, num_items)
    while item.number >= 0:
        first = item.number * CHUNK_PANELS
        last = min(first + CHUNK_PANELS, half)
        gates = prepare(tiles, matrix, first, last, num_rows, scratch, 0)
        ups = prepare(tiles, matrix, half + first, half + last, num_rows, scratch, room)
        size, at, row = (last - first) * OUTPUTS, first * OUTPUTS, 0
        while row < num_rows:
            num_left = num_rows - row
            multiply(tiles, matrix, first, last, gates, x, row, num_left, tile, 0, 0)
            count = multiply(
                tiles, matrix, half + first, half + last, ups, x, row, num_left, tile, 0, size
            )
            for r in range(count):
                if bias != NONE:
                    for i in range(size):
                        tile[r, i] += vectors[bias + at + i]
                        tile[r, size + i] += vectors[bias + half * OUTPUTS + at + i]
                _gate(tile[r, :size], tile[r, size : 2 * size], activation)
                for start in range(0, size, BLOCK_INPUTS):
                    block = (at + start) // BLOCK_INPUTS
                    _quantize_block(tile[r], start, out, row + r, block, num_rows)
            row += count
        num_done += 1
        item = next_item(turns, item.stretch, num_items)
    finish(num_rows)
    return num_done


@compiled
def _quantize_block(x: Any, start: int, out: Rows, row: int, block: int, num_rows: int) -> None:
    num_blocks = out.scales.shape[1]
    if is_wide(num_rows):
        index = (row // WIDE_ROWS * num_blocks + block) * WIDE_ROWS + row % WIDE_ROWS
    else:
        index = row * num_blocks + block
    panel_simd.quantize_block(
        x.ctypes.data + 4 * start, out.levels.ctypes.data + BLOCK_INPUTS * index,
        out.scales.ctypes.data + 4 * index, out.sums.ctypes.data + 4 * index,
    )  # fmt: skip


@compiled
def quantize(x: Any, out: Rows, row: int, num_rows: int) -> None:
    """To row `row` of `num_rows`, which are multiplied together."""
    for block in range(x.shape[0] // BLOCK_INPUTS):
        _quantize_block(x, block * BLOCK_INPUTS, out, row, block, num_rows)
