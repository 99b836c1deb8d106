"""How fast all threads multiply with the project's own matrix tiles. Knows no models."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numba
import numpy as np

from engine.kernels.panel_amx import UNPACKED_BYTES, WIDE_ROWS
from engine.kernels.panel_matrix import BLOCK_INPUTS, PANEL_FORMS, PANEL_OUTPUTS, PanelMatrix
from engine.kernels.panel_product import (
    ADDRESS,
    BIAS,
    CHUNK_PANELS,
    FORM,
    MATRIX_COLUMNS,
    NONE,
    NUM_BLOCKS,
    NUM_PANELS,
    Rows,
    project,
)
from engine.kernels.panel_tiles import STREAMS, Tiles, compiled_tiles
from engine.kernels.thread_team import Turns

Work = Callable[[], float]
"""Does some of the work without holding the interpreter, and says how much it was."""


class Products:
    """Rows of ones times some matrices, one after the other, by the thread that calls.

    `out` [`num_rows` and some to spare, outputs of the widest matrix] float32: of the last one.
    """

    def __init__(
        self, matrices: Sequence[PanelMatrix], num_rows: int, streams: int = STREAMS[-1]
    ) -> None:
        self.operations = sum(2 * num_rows * matrix.data[..., 0].size for matrix in matrices)
        self.operations *= PANEL_OUTPUTS * BLOCK_INPUTS
        self._matrices = list(matrices)  # they must live as long as their addresses
        num_panels, num_blocks = (
            max(matrix.data.shape[axis] for matrix in matrices) for axis in (0, 1)
        )
        with_spare = num_rows + WIDE_ROWS
        self.out = np.zeros((with_spare, num_panels * PANEL_OUTPUTS), np.float32)
        rows = Rows(
            np.ones((with_spare, num_blocks * BLOCK_INPUTS), np.int8),
            np.ones((with_spare, num_blocks), np.float32),
            np.full((with_spare, num_blocks), BLOCK_INPUTS, np.float32),
        )
        self._arguments: tuple[Any, ...] = (
            compiled_tiles()._replace(streams=streams), _table(matrices), rows, num_rows, self.out,
            np.zeros(1, np.int64), np.zeros(CHUNK_PANELS * num_blocks * UNPACKED_BYTES, np.uint8),
        )  # fmt: skip

    def run(self, times: int = 1) -> float:
        """How many operations (multiplies and adds) that was."""
        _compile(vars(numba.config)["CACHE_DIR"])(*self._arguments, times)
        return float(times * self.operations)


def together(works: Sequence[Work]) -> float:
    """Each by a thread of its own, all at once: how much they did per second."""
    barrier = threading.Barrier(len(works))
    spans: list[tuple[float, float, float]] = []

    def run(work: Work) -> None:
        barrier.wait()
        begin_s = time.perf_counter()
        amount = work()
        spans.append((begin_s, time.perf_counter(), amount))

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begins, ends, amounts = zip(*spans, strict=True)
    return float(sum(amounts) / (max(ends) - min(begins)))


def _table(matrices: Sequence[PanelMatrix]) -> Any:
    """[matrices, MATRIX_COLUMNS] int64."""
    table = np.zeros((len(matrices), MATRIX_COLUMNS), np.int64)
    table[:, BIAS] = NONE
    for row, matrix in zip(table, matrices, strict=True):
        assert matrix.data.flags.c_contiguous
        row[[ADDRESS, FORM]] = matrix.data.ctypes.data, PANEL_FORMS.index(matrix.form)
        row[[NUM_PANELS, NUM_BLOCKS]] = matrix.data.shape[:2]
    return table


def _project_all(
    tiles: Tiles, matrices: Any, rows: Rows, num_rows: int, out: Any, counter: Any, unpacked: Any,
    times: int,
) -> None:  # fmt: skip
    no_biases = np.zeros(0, np.float32)
    for _ in range(times):
        for i in range(len(matrices)):
            counter[0] = 0
            turns = Turns(0, 1, counter.ctypes.data)
            project(tiles, matrices[i], no_biases, rows, num_rows, out, turns, unpacked)


@cache
def _compile(folder: str) -> Any:
    return numba.njit(nogil=True, cache=bool(folder))(_project_all)
