"""What this machine can do at most: bytes from memory and integer products per second.

The two limits of Williams, Waterman and Patterson's roofline model (2009), measured with all
threads: a streaming read of a buffer larger than the caches, and the project's own matrix tiles on
weights that stay in a core's own caches. A step of a model can be no faster than its bytes over the
one and its operations over the other. Knows no models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import psutil
from numpy.typing import NDArray

from engine.kernels.panel_matrix import (
    BLOCK_INPUTS,
    PANEL_OUTPUTS,
    PanelForm,
    PanelKind,
    PanelMatrix,
)
from engine.product_timing import Products, Work, together

MIN_BUFFER_BYTES = 256 * 1024**2
MAX_MEMORY_SHARE = 0.125
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

NUM_INPUTS = 512
NUM_PANELS = 4
"""Of `NUM_INPUTS` inputs: 36 KiB of 8-bit weights, which stay in a core's second cache."""

NUM_ROWS = (1, 4, 8, 64)
"""Rows that are multiplied together: each has tiles of its own."""

NUM_STREAMS = (1, 4)
"""Of a core that reads: which is faster depends on the CPU (`panel_streams.py`)."""

FORMS = {4: PanelForm(4, PanelKind.MINIMUM), 8: PanelForm(8, PanelKind.ZERO)}


@dataclass(frozen=True, slots=True)
class Roofline:
    """Per second, the best of several tries with `num_threads` threads.

    `operations_per_s`: by (bits of a weight, rows that share its load); multiplies and adds.
    """

    num_threads: int
    buffer_bytes: int
    bandwidth_bytes_per_s: float
    operations_per_s: dict[tuple[int, int], float]

    def peak(self, bits: int, num_rows: int) -> float:
        """For a step of so many rows: what was measured with as many, or the next fewer."""
        known = bits if bits in FORMS else 8
        measured = [rows for of, rows in self.operations_per_s if of == known]
        return self.operations_per_s[known, max(r for r in measured if r <= max(1, num_rows))]


def measure_roofline(
    num_threads: int, seconds: float = 1.0, buffer_bytes: int | None = None
) -> Roofline:
    """Takes about `seconds` for each of the ten figures, and some more to compile them once.

    Raises ValueError for fewer than one thread.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}")
    size = buffer_bytes or choose_buffer_bytes()
    rates = {
        (bits, rows): _best(num_threads, seconds, _tile_work(form, rows))
        for bits, form in FORMS.items()
        for rows in NUM_ROWS
    }
    bandwidth = max(
        _best(num_threads, seconds, _read_work(size // num_threads, num_streams))
        for num_streams in NUM_STREAMS
    )
    return Roofline(num_threads, size, bandwidth, rates)


def choose_buffer_bytes() -> int:
    """Twice the last cache, where the system tells its size; at most an eighth of free memory."""
    wanted = max(MIN_BUFFER_BYTES, 2 * last_cache_bytes(_CACHES))
    return min(wanted, int(psutil.virtual_memory().available * MAX_MEMORY_SHARE))


def last_cache_bytes(folder: Path) -> int:
    """The largest cache that Linux lists, 0 elsewhere."""
    units = {"K": 1024, "M": 1024**2, "G": 1024**3}
    sizes = [0]
    for path in folder.glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        if text[:-1].isdecimal() and text[-1] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes)


def _best(num_threads: int, seconds: float, make_work: Callable[[], Work]) -> float:
    """The most per second of several short tries by all threads at once."""
    works = [make_work() for _ in range(num_threads)]
    for work in works:
        work()
    best, end_s = 0.0, time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < end_s:
        best = max(best, together(works))
    return best


def _read_work(num_bytes: int, num_streams: int) -> Callable[[], Work]:
    def make() -> Work:
        buffer = np.ones((num_streams, max(1, num_bytes // 8 // num_streams)), np.int64)
        read = _reader(num_streams)

        def work() -> float:
            assert read(buffer) == buffer.size
            return float(buffer.nbytes)

        return work

    return make


def _tile_work(form: PanelForm, num_rows: int) -> Callable[[], Work]:
    def make() -> Work:
        products = Products([matrix_of_ones(form)], num_rows)
        return lambda: products.run(max(1, _ROWS_OF_A_TRY // num_rows))

    return make


_ROWS_OF_A_TRY = 2_000


def matrix_of_ones(form: PanelForm) -> PanelMatrix:
    """[16 * `NUM_PANELS`, `NUM_INPUTS`]."""
    num_blocks = NUM_INPUTS // BLOCK_INPUTS
    panels: NDArray[np.uint8] = np.zeros((NUM_PANELS, num_blocks, form.block_bytes), np.uint8)
    panels[:, :, : form.values_bytes] = 0x11 if form.bits == 4 else 1
    scales = np.ones(PANEL_OUTPUTS, np.float16).view(np.uint8)
    panels[:, :, form.values_bytes : form.values_bytes + len(scales)] = scales
    return PanelMatrix(form, NUM_PANELS * PANEL_OUTPUTS, panels)


def _read_one(buffer: Any) -> Any:
    total = 0
    for i in range(buffer.shape[1]):
        total += buffer[0, i]
    return total


def _read_four(buffer: Any) -> Any:
    total = 0
    for i in range(buffer.shape[1]):
        for stream in range(4):
            total += buffer[stream, i]
    return total


@cache
def _reader(num_streams: int) -> Any:
    return numba.njit(nogil=True)(_read_one if num_streams == 1 else _read_four)
