"""Writes the panels of a checkpoint's matrices: the weights in the form of the CPU's own kernels.

A file beside `weights.bin`, since one cannot be read in the other's place: MatMulNBits has no real
minimum per block, and panels lie in the order in which cores stream them. Knows nothing of graphs
or of the rest of the bundle.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from engine.architectures.config import ModelConfig
from engine.export.packing import DENSE_BITS, PackedMatrix, unpack_blocks
from engine.export.weights_file import AlignedFile
from engine.importers.checkpoint import CheckpointTensor
from engine.importers.integer_blocks import IntegerBlocks
from engine.importers.minimum_blocks import minimum_blocks
from engine.kernels.panel_matrix import (
    BLOCK_INPUTS,
    PANEL_FORMS,
    PANEL_OUTPUTS,
    Blocks,
    PanelForm,
    PanelKind,
    PanelMatrix,
    choose_form,
    pack_panels,
)

PANELS_FILE = "panels.bin"
PANELS_INDEX_FILE = "panels.json"
_CHUNK_ROWS = 64 * PANEL_OUTPUTS


@dataclass(frozen=True, slots=True)
class StoredPanels:
    """Where the panels of a matrix [N, K] lie: `offset` in bytes, panel after panel."""

    bits: int
    kind: str
    num_rows: int
    num_cols: int
    offset: int

    @property
    def form(self) -> PanelForm:
        return PanelForm(self.bits, PanelKind(self.kind))

    @property
    def form_number(self) -> int:
        return PANEL_FORMS.index(self.form)

    @property
    def num_panels(self) -> int:
        return -(-self.num_rows // PANEL_OUTPUTS)

    @property
    def num_blocks(self) -> int:
        return self.num_cols // BLOCK_INPUTS

    @property
    def num_bytes(self) -> int:
        return self.num_panels * self.num_blocks * self.form.block_bytes


def have_panels(config: ModelConfig) -> bool:
    """Whether the sizes of a model are whole blocks and panels, so that the kernels can run it."""
    inputs = (config.hidden_size, config.num_heads * config.head_size, config.intermediate_size)
    return not any(size % BLOCK_INPUTS for size in inputs) and config.qkv_size % PANEL_OUTPUTS == 0


class PanelsFile(AlignedFile):
    """Appends matrices; `finish` writes the index. A context manager."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / PANELS_FILE)
        self._folder = folder
        self._index: dict[str, StoredPanels] = {}
        self._is_complete = True

    def append(self, name: str, blocks: Blocks | None) -> None:
        """None: there are no panels of this matrix, and so of the model. OSError: a full disk."""
        if blocks is None:
            self._is_complete = False
            return
        form, num_rows = choose_form(blocks), blocks.shape[0]
        starts = range(0, num_rows, _CHUNK_ROWS)
        parts = (pack_panels(blocks.rows(at, at + _CHUNK_ROWS), form) for at in starts)
        self.append_panels(name, parts)

    def append_panels(self, name: str, parts: Iterable[PanelMatrix]) -> None:
        """Parts of one matrix, all but the last of whole panels. Raises OSError."""
        offset, num_rows = self.begin(), 0
        for part in parts:
            self.stream.write(part.data.data)
            num_rows += part.num_rows
        form = part.form
        self._index[name] = StoredPanels(
            form.bits, form.kind.value, num_rows, part.num_cols, offset
        )

    def layer_bits(self) -> set[int]:
        """Of the matrices of the layers."""
        return {stored.bits for name, stored in self._index.items() if name.startswith("layers.")}

    def finish(self) -> tuple[str, ...]:
        """The names of the files written: none if the model has no panels. After closing."""
        if not self._is_complete or not self._index:
            (self._folder / PANELS_FILE).unlink()
            return ()
        index = {name: asdict(stored) for name, stored in self._index.items()}
        (self._folder / PANELS_INDEX_FILE).write_text(json.dumps(index), "utf-8")
        return PANELS_FILE, PANELS_INDEX_FILE


def read_panels_index(folder: Path) -> dict[str, StoredPanels]:
    """Raises OSError, ValueError or TypeError when the index is not one of ours."""
    document = json.loads((folder / PANELS_INDEX_FILE).read_text("utf-8"))
    if not isinstance(document, dict):
        raise TypeError("it is no object")
    return {str(name): StoredPanels(**entry) for name, entry in document.items()}


def read_panels(folder: Path, stored: StoredPanels) -> PanelMatrix:
    """Into memory. Raises OSError or ValueError."""
    data = np.fromfile(folder / PANELS_FILE, np.uint8, stored.num_bytes, offset=stored.offset)
    shape = stored.num_panels, stored.num_blocks, stored.form.block_bytes
    return PanelMatrix(stored.form, stored.num_rows, data.reshape(shape))


def panel_blocks(
    tensors: Sequence[CheckpointTensor], packed: PackedMatrix, keep_minima: bool
) -> Blocks | None:
    """The weights of a stacked matrix; None when panels cannot hold them (not quantized, or in
    blocks of another size).

    `keep_minima`: storages with a real-valued minimum are taken from the checkpoint, where
    `packed` only holds them rounded.
    """
    if packed.bits == DENSE_BITS or packed.block_size % BLOCK_INPUTS:
        return None
    if not keep_minima:
        return _from_integers(unpack_blocks(packed))
    found = [_exact_blocks(tensor) for tensor in tensors]
    if all(blocks is None for blocks in found):
        return _from_integers(unpack_blocks(packed))
    rounded = _from_integers(unpack_blocks(packed))
    parts, row = [], 0
    for tensor, blocks in zip(tensors, found, strict=True):
        end = row + tensor.shape[0]
        parts.append(rounded.rows(row, end) if blocks is None else blocks)
        row = end
    return _stack(parts)


def _exact_blocks(tensor: CheckpointTensor) -> Blocks | None:
    integers = tensor.blocks()
    if integers is not None:
        whole = integers.group_size % BLOCK_INPUTS == 0
        return _from_integers(integers) if whole else None
    return minimum_blocks(tensor.quant_type, np.asarray(tensor.raw()))


def _from_integers(integers: IntegerBlocks) -> Blocks:
    num_blocks = integers.values.shape[1] // BLOCK_INPUTS
    times = integers.group_size // BLOCK_INPUTS
    scales = np.repeat(integers.scales, times, axis=1)[:, :num_blocks]
    zeros = np.repeat(integers.zeros, times, axis=1)[:, :num_blocks]
    return Blocks(integers.bits, integers.values, scales, -zeros.astype(np.float32) * scales)


def _stack(parts: Sequence[Blocks]) -> Blocks:
    """One below the other: 4-bit values are 8-bit values too."""
    return Blocks(
        max(part.bits for part in parts),
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate([part.minima for part in parts]),
    )
