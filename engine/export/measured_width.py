"""Measures, on the machine that imports a model, whether its 4-bit panels are faster in 8 bits.

A writer of models around another one: what that has written is measured, and rewritten if need be.
The decision is `panel_width.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.export.exporter import OnProgress, WriteModel, Written, remove_folder
from engine.export.model import WrittenModel
from engine.export.panels import (
    PANELS_FILE,
    PANELS_INDEX_FILE,
    PanelsFile,
    StoredPanels,
    read_panels,
    read_panels_index,
)
from engine.importers.checkpoint import Checkpoint
from engine.kernels import kernel_cache
from engine.kernels.panel_matrix import PanelMatrix, widen_panels
from engine.kernels.panel_tiles import STREAMS
from engine.panel_width import (
    NARROW,
    PANEL_WIDTH_FILE,
    PROMPT_ROWS,
    WIDE,
    WidthCosts,
    choose_width,
    encode_choice,
)
from engine.product_timing import Products, together

MIN_WEIGHTS = 1 << 20
"""With fewer, what matters is not the products."""

SAMPLE_BYTES = 128 << 20
"""Of 4-bit panels, which are beyond most caches where the model is; layers are like each other."""

NUM_TRIES = 5


def with_measured_width(write: WriteModel, num_threads: int, room_bytes: int) -> WriteModel:
    """`num_threads` as the engine will use them; `room_bytes`: memory that is free."""

    def write_and_measure(checkpoint: Checkpoint, folder: Path, on_progress: OnProgress) -> Written:
        written = write(checkpoint, folder, lambda done, total: on_progress(done, total + 1))
        index = read_panels_index(folder) if PANELS_INDEX_FILE in written.files else {}
        narrow = [stored for stored in index.values() if stored.bits == NARROW]
        num_weights = sum(stored.num_rows * stored.num_cols for stored in narrow)
        if num_weights < MIN_WEIGHTS:
            return written
        costs = measure_width_costs(_sample(folder, narrow), num_weights, num_threads)
        choice = choose_width(costs, room_bytes)
        if choice.bits == WIDE:
            _widen(folder, index)
        (folder / PANEL_WIDTH_FILE).write_text(encode_choice(choice, costs), "utf-8")
        return WrittenModel((*written.files, PANEL_WIDTH_FILE), written.weight_format)

    return write_and_measure


def measure_width_costs(
    narrow: Sequence[PanelMatrix], num_weights: int, num_threads: int
) -> WidthCosts:
    """Of matrices in 4-bit panels, each divided among the threads. Takes about a second, and once
    on a machine as long as it takes to compile the tiles."""
    kernel_cache.use_kernel_cache(kernel_cache.default_folder())
    forms = {NARROW: list(narrow), WIDE: [widen_panels(matrix) for matrix in narrow]}
    teams = {
        (bits, num_rows): [
            _team(matrices, num_rows, streams, num_threads)
            for streams in (STREAMS if num_rows == 1 else STREAMS[-1:])
        ]
        for num_rows in (1, PROMPT_ROWS)
        for bits, matrices in forms.items()
    }
    best = dict.fromkeys(teams, 0.0)
    for _ in range(NUM_TRIES):
        for key, choices in teams.items():
            rates = [together([products.run for products in team]) for team in choices]
            best[key] = max(best[key], *rates)
    return WidthCosts(
        num_threads,
        num_weights,
        {bits: best[bits, 1] for bits in forms},
        {bits: best[bits, PROMPT_ROWS] for bits in forms},
    )


def _team(
    matrices: Sequence[PanelMatrix], num_rows: int, streams: int, num_threads: int
) -> list[Products]:
    """A share of the panels of every matrix for each thread."""
    shares: list[list[PanelMatrix]] = [[] for _ in range(num_threads)]
    for matrix in matrices:
        size = -(-len(matrix.data) // num_threads)
        for part, share in enumerate(shares):
            panels = matrix.data[part * size : (part + 1) * size]
            if len(panels):
                share.append(PanelMatrix(matrix.form, matrix.num_rows, panels))
    return [Products(share, num_rows, streams) for share in shares if share]


def _sample(folder: Path, narrow: Sequence[StoredPanels]) -> list[PanelMatrix]:
    matrices, num_bytes = [], 0
    for stored in narrow:
        matrices.append(read_panels(folder, stored))
        num_bytes += stored.num_bytes
        if num_bytes >= SAMPLE_BYTES:
            break
    return matrices


def _widen(folder: Path, index: Mapping[str, StoredPanels]) -> None:
    """Rewrites the panels in `folder`. Raises OSError for a full disk."""
    aside = folder / "wide"
    aside.mkdir()
    with PanelsFile(aside) as file:
        for name, stored in index.items():
            matrix = read_panels(folder, stored)
            is_narrow = matrix.form.bits == NARROW
            file.append_panels(name, [widen_panels(matrix) if is_narrow else matrix])
    file.finish()
    for name in (PANELS_FILE, PANELS_INDEX_FILE):
        (aside / name).replace(folder / name)
    remove_folder(aside)
