"""The step kernel's parts against numpy, and every tile of rows against one row at a time."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.kernels import panel_simd
from engine.kernels.panel_amx import UNPACKED_BYTES
from engine.kernels.panel_matrix import PANEL_FORMS, Blocks, PanelForm, pack_panels
from engine.kernels.panel_product import (
    NONE,
    Rows,
    finish,
    multiply,
    prepare,
    product_chunks,
    project,
    project_gated,
    quantize,
)
from engine.kernels.panel_simd import make_tile
from engine.kernels.panel_tiles import STREAMS, compiled_tiles, is_wide
from engine.kernels.thread_team import COUNTER_BYTES, Turns
from tests.engine.test_panel_matrix import random_blocks

Floats = NDArray[np.float32]
_compiled: Any = numba.njit


def make_rows(x: Floats, together: int | None = None) -> Rows:
    """Quantized, to be multiplied `together` (default: all at once), with room behind."""
    num_rows, size = x.shape
    levels = np.zeros((num_rows + 16, size), np.int8)
    scales, sums = (np.zeros((num_rows + 16, size // 32), np.float32) for _ in range(2))
    rows = Rows(levels, scales, sums)
    for row in range(num_rows):
        quantize(x[row], rows, row, together or num_rows)
    return rows


def by_row(rows: Rows, num_rows: int) -> Rows:
    """Rows that were quantized to be multiplied together, one after another."""
    if not is_wide(num_rows):
        return rows
    num_blocks = rows.scales.shape[1]

    def untiled(x: Any) -> Any:
        whole = x[: len(x) // 16 * 16].reshape(-1, num_blocks, 16, x.shape[1] // num_blocks)
        return whole.swapaxes(1, 2).reshape(-1, x.shape[1])

    return Rows(*map(untiled, rows))


def dequantized(rows: Rows, num_rows: int) -> NDArray[np.float64]:
    rows = by_row(rows, num_rows)
    blocks = rows.levels[:num_rows].reshape(num_rows, -1, 32).astype(np.float64)
    values: NDArray[np.float64] = blocks * rows.scales[:num_rows, :, None]
    return values.reshape(num_rows, -1)


def make_matrix(blocks: Blocks, form: PanelForm, bias: int = NONE) -> tuple[NDArray[np.int64], Any]:
    """(a row of the kernel's table, what must live as long)."""
    data = pack_panels(blocks, form).data
    row = [data.ctypes.data, PANEL_FORMS.index(form), data.shape[0], data.shape[1], bias]
    return np.array(row, np.int64), data


def gaussian(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


class TestQuantize:
    def test_levels_are_the_nearest_of_127(self) -> None:
        x = gaussian(3, 64)
        rows = make_rows(x)
        blocks = x.reshape(3, 2, 32)
        scales = np.abs(blocks).max(axis=2) / np.float32(127)
        assert np.allclose(rows.scales[:3], scales, rtol=1e-6)
        error = np.abs(dequantized(rows, 3).reshape(blocks.shape) - blocks)
        assert (error <= scales[:, :, None] * 0.5001).all()
        assert (
            np.abs(rows.levels[:3].reshape(blocks.shape)).max(axis=2).tolist() == [[127, 127]] * 3
        )

    def test_sums_are_of_what_was_stored(self) -> None:
        rows = make_rows(gaussian(2, 96))
        expected = dequantized(rows, 2).reshape(2, 3, 32).sum(axis=2)
        assert np.allclose(rows.sums[:2], expected, rtol=1e-6, atol=1e-6)

    def test_zeros_stay_zeros(self) -> None:
        rows = make_rows(np.zeros((1, 32), np.float32))
        assert not rows.levels.any() and not rows.scales.any() and not rows.sums.any()

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_makes_its_block_nan(self, bad: float) -> None:
        x = gaussian(1, 64)
        x[0, 40] = bad
        rows = make_rows(x)
        assert np.isfinite(rows.scales[0, 0]) and np.isnan(rows.scales[0, 1])
        assert np.isnan(rows.sums[0, 1])

    def test_the_smallest_numbers_do_not_overflow(self) -> None:
        rows = make_rows(np.full((1, 32), 1e-44, np.float32))
        assert np.isfinite(rows.scales).all() and np.isfinite(rows.sums).all()


SCRATCH = np.zeros(16 * 6 * UNPACKED_BYTES, np.uint8)


def times(
    matrix: Any, num_panels: int, rows: Rows, num_rows: int, streams: int = STREAMS[-1]
) -> Floats:
    """`rows`, quantized for so many, times the first panels."""
    out = np.zeros((num_rows + 8, 16 * num_panels), np.float32)
    tiles = compiled_tiles()._replace(streams=streams)
    unpacked = prepare(tiles, matrix, 0, num_panels, num_rows, SCRATCH, 0)
    row = 0
    while row < num_rows:
        row += multiply(
            tiles, matrix, 0, num_panels, unpacked, rows, row, num_rows - row, out, row, 0
        )
    finish(num_rows)
    assert row == num_rows
    return out[:num_rows]


@pytest.mark.parametrize("form", PANEL_FORMS, ids=lambda form: f"{form.bits}-{form.kind}")
class TestMultiply:
    def test_equals_the_product_of_what_is_stored(self, form: PanelForm) -> None:
        blocks = random_blocks(form.kind, form.bits, num_rows=48)
        matrix, alive = make_matrix(blocks, form)
        rows = make_rows(gaussian(8, 96))
        expected = dequantized(rows, 8) @ blocks.dequantize().astype(np.float64).T
        out = times(matrix, 3, rows, 8)
        assert np.allclose(out, expected, rtol=1e-5, atol=1e-4 * np.abs(expected).max())
        assert alive is not None

    @pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 13, 64, 70, 77])
    def test_a_row_is_the_same_in_every_company(self, form: PanelForm, num_rows: int) -> None:
        """And in tiles of one panel or of several, of which one has six left over."""
        matrix, alive = make_matrix(random_blocks(form.kind, form.bits, num_rows=96), form)
        x = gaussian(num_rows, 96)
        alone = [times(matrix, 6, make_rows(x[row : row + 1]), 1)[0] for row in range(num_rows)]
        for streams in STREAMS:
            together = times(matrix, 6, make_rows(x), num_rows, streams)
            assert np.array_equal(together, alone)
        assert alive is not None

    def test_the_plain_dot_product_gives_the_same_bits(self, form: PanelForm) -> None:
        """What a machine without such an instruction computes."""
        tile = make_tile(form, "none")

        @_compiled  # type: ignore[untyped-decorator]
        def run(panel: int, rows: Any, out: Any) -> None:
            tile(
                (0, 0), panel, rows.levels.shape[1] // 32, rows.levels.ctypes.data,
                rows.levels.strides[0], rows.scales.ctypes.data, rows.sums.ctypes.data,
                rows.scales.strides[0], out.ctypes.data, out.strides[0],
            )  # fmt: skip

        matrix, alive = make_matrix(random_blocks(form.kind, form.bits, num_rows=16), form)
        rows = make_rows(gaussian(2, 96))
        plain = np.zeros((2, 16), np.float32)
        run(matrix[0], rows, plain)
        assert np.array_equal(plain, times(matrix, 1, rows, 2))
        assert alive is not None


FORM = PANEL_FORMS[1]


def zeros(num_threads: int = 1) -> NDArray[np.int64]:
    """The counters of `Turns`."""
    return np.zeros(num_threads * COUNTER_BYTES // 8, np.int64)


@pytest.mark.parametrize("num_rows", [1, 3, 9, 70])
def test_a_projection_adds_its_bias(num_rows: int) -> None:
    blocks = random_blocks(FORM.kind, FORM.bits, num_rows=160)
    matrix, alive = make_matrix(blocks, FORM, bias=5)
    vectors = gaussian(5 + 160, seed=1)
    rows, out = make_rows(gaussian(num_rows, 96)), np.zeros((num_rows + 8, 160), np.float32)
    project(
        compiled_tiles(), matrix, vectors, rows, num_rows, out, Turns(0, 1, zeros().ctypes.data),
        SCRATCH,
    )  # fmt: skip
    expected = dequantized(rows, num_rows) @ blocks.dequantize().astype(np.float64).T + vectors[5:]
    assert np.allclose(out[:num_rows], expected, rtol=1e-4, atol=1e-3)
    assert alive is not None


def test_two_threads_do_every_panel_once() -> None:
    matrix, alive = make_matrix(random_blocks(FORM.kind, FORM.bits, num_rows=160), FORM)
    rows, counters = make_rows(gaussian(2, 96)), zeros(2)
    whole, first, second = (np.full((10, 160), np.nan, np.float32) for _ in range(3))
    everything = Turns(0, 1, zeros().ctypes.data)
    project(compiled_tiles(), matrix, gaussian(1), rows, 2, whole, everything, SCRATCH)
    counters[0] = 1  # the other one has taken the first chunk of its stretch
    turns = [Turns(part, 2, counters.ctypes.data) for part in range(2)]
    num_done = project(compiled_tiles(), matrix, gaussian(1), rows, 2, first, turns[1], SCRATCH)
    assert num_done == product_chunks(matrix, 2) - 1
    assert np.isnan(first[:2, :64]).all()
    assert np.array_equal(first[:2, 64:], whole[:2, 64:])
    assert project(compiled_tiles(), matrix, gaussian(1), rows, 2, second, turns[0], SCRATCH) == 0
    assert np.isnan(second).all() and alive is not None


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(x / (1 + np.exp(-x)))


def gelu_tanh(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


@pytest.mark.parametrize(("number", "activation"), [(0, silu), (1, gelu_tanh)])
@pytest.mark.parametrize("bias", [NONE, 3])
@pytest.mark.parametrize("num_rows", [5, 69])
def test_a_gated_projection_is_activation_times_up(
    number: int, activation: Any, bias: int, num_rows: int
) -> None:
    size = 96
    blocks = random_blocks(FORM.kind, FORM.bits, num_rows=2 * size)
    blocks.scales[:] *= np.float32(2**-6)
    blocks.minima[:] *= np.float32(2**-6)
    matrix, alive = make_matrix(blocks, FORM, bias)
    vectors = gaussian(3 + 2 * size, seed=2)
    rows = make_rows(gaussian(num_rows, 96))
    out = make_rows(np.zeros((num_rows, size), np.float32))
    tile = np.zeros((16, 128), np.float32)
    project_gated(
        compiled_tiles(), matrix, vectors, number, rows, num_rows, tile, out,
        Turns(0, 1, zeros().ctypes.data), SCRATCH,
    )  # fmt: skip
    both = dequantized(rows, num_rows) @ blocks.dequantize().astype(np.float64).T
    if bias != NONE:
        both += vectors[bias:]
    expected = activation(both[:, :size]) * both[:, size:]
    found = dequantized(out, num_rows)
    allowed = (
        np.repeat(np.asarray(by_row(out, num_rows).scales[:num_rows]), 32, axis=1) * 0.51 + 1e-5
    )
    assert (np.abs(found - expected) <= allowed).all()
    assert alive is not None


@pytest.mark.parametrize(
    ("gate", "activation"),
    [(panel_simd.gate_silu, silu), (panel_simd.gate_gelu_tanh, gelu_tanh)],
)
def test_a_gate_holds_its_limits(gate: Any, activation: Any) -> None:
    @_compiled  # type: ignore[untyped-decorator]
    def run(gates: Any, ups: Any, out: Any) -> None:
        gate(gates.ctypes.data, ups.ctypes.data, out.ctypes.data)

    x = np.array(
        [0, -0.0, 1, -1, 5, -5, 20, -20, 80, -80, 1000, -1000, 1e30, -1e30, 1e-30, np.nan],
        np.float32,
    )
    out = np.zeros(16, np.float32)
    run(x, np.full(16, 2, np.float32), out)
    with np.errstate(all="ignore"):
        expected = 2 * activation(x[:12].astype(np.float64))
    assert np.allclose(out[:12], np.nan_to_num(expected, nan=0), rtol=1e-5, atol=1e-6)
    assert out[12] == np.float32(2e30) and abs(out[13]) < 1e-6
    assert np.isnan(out[15])
