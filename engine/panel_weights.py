"""A bundle's panels and vectors, mapped and laid out in the tables that the step kernel reads."""

from __future__ import annotations

import numpy as np

from engine.architectures.config import ModelConfig
from engine.attention import rope_table
from engine.batch import Float32Array
from engine.bundle import Bundle
from engine.export.graph import LayerWeights
from engine.export.model import DecoderWeights, load_weights
from engine.export.panels import (
    PANELS_FILE,
    PANELS_INDEX_FILE,
    StoredPanels,
    read_panels_index,
)
from engine.export.weights_file import StoredArray, StoredMatrix, map_array
from engine.kernels.panel_product import MATRIX_COLUMNS, NONE
from engine.kernels.panel_tiles import compiled_tiles
from engine.kernels.step_kernel import LAYER_COLUMNS, Model


def has_panels(bundle: Bundle) -> bool:
    """Whether the step kernel can run this bundle."""
    listed = {file.name for file in bundle.manifest.files}
    return PANELS_FILE in listed and PANELS_INDEX_FILE in listed


class PanelWeights:
    """Holds the mapping for as long as it lives. `final_norm`, `head`: see `Numbers`."""

    def __init__(self, bundle: Bundle, max_model_len: int) -> None:
        """Raises BundleError when a file is damaged."""
        self._weights = load_weights(bundle.path)
        self._weights_path = bundle.weights_path
        self._index = _read_index(bundle)
        self._panels = np.memmap(bundle.path / PANELS_FILE, np.uint8, "r")
        self._vectors: list[Float32Array] = []
        self._matrices: list[list[int]] = []
        layers = _layer_table(self, bundle.config, self._weights)
        self.final_norm = self.vector(self._weights.final_norm)
        is_tied = "lm_head" not in self._index
        self.head = self.matrix("embed" if is_tied else "lm_head", self._weights.lm_head)
        tables = [rope_table(rope, max_model_len) for rope in bundle.config.ropes]
        self.model = Model(
            tiles=compiled_tiles(),
            layers=layers,
            matrices=np.array(self._matrices, np.int64),
            vectors=np.concatenate(self._vectors),
            cos=tuple(cos for cos, _ in tables),
            sin=tuple(sin for _, sin in tables),
        )

    def vector(self, stored: StoredArray | None) -> int:
        """Its offset among the vectors."""
        if stored is None:
            return NONE
        offset = sum(len(vector) for vector in self._vectors)
        self._vectors.append(np.array(map_array(self._weights_path, stored), np.float32))
        return offset

    def matrix(self, name: str, stored: StoredMatrix) -> int:
        """Its number among the matrices."""
        panels = self._index[name]
        row = [
            self._panels.ctypes.data + panels.offset,
            panels.form_number,
            panels.num_panels,
            panels.num_blocks,
            self.vector(stored.bias),
        ]
        assert len(row) == MATRIX_COLUMNS
        self._matrices.append(row)
        return len(self._matrices) - 1


def _layer_table(weights: PanelWeights, config: ModelConfig, decoder: DecoderWeights) -> np.ndarray:
    rows = []
    for i, layer in enumerate(decoder.layers):
        rows.append([*_layer_row(weights, f"layers.{i}.", layer), *_attention_row(config, i)])
    table = np.array(rows, np.int64)
    assert table.shape[1] == LAYER_COLUMNS
    return table


def _layer_row(weights: PanelWeights, prefix: str, layer: LayerWeights) -> list[int]:
    """In the order of the columns in `step_kernel.py`."""
    return [
        weights.vector(layer.attn_norm),
        weights.matrix(prefix + "qkv", layer.qkv),
        weights.vector(layer.q_norm),
        weights.vector(layer.k_norm),
        weights.matrix(prefix + "o", layer.o),
        weights.vector(layer.post_attn_norm),
        weights.vector(layer.mlp_norm),
        weights.matrix(prefix + "gate_up", layer.gate_up),
        weights.matrix(prefix + "down", layer.down),
        weights.vector(layer.post_mlp_norm),
    ]


def _attention_row(config: ModelConfig, index: int) -> list[int]:
    layer = config.layers[index]
    return [layer.window, layer.rope]


def _read_index(bundle: Bundle) -> dict[str, StoredPanels]:
    try:
        index = read_panels_index(bundle.path)
        size = (bundle.path / PANELS_FILE).stat().st_size
        if any(panels.offset + panels.num_bytes > size for panels in index.values()):
            raise ValueError("a matrix ends past the end of the file")
    except (OSError, ValueError, TypeError) as error:
        raise bundle.damaged(f"its {PANELS_INDEX_FILE} is damaged ({error})") from error
    return index
