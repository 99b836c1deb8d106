"""Writes a checkpoint's weights and segment graphs into a bundle's folder, tensor by tensor.

At most one stacked matrix (and its packed form) is in memory at a time. Knows nothing of the
rest of the bundle (manifest, tokenizer): that is `exporter.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from engine.architectures.config import ModelConfig
from engine.bundle import WEIGHTS_FILE, bundle_problem
from engine.errors import BundleError
from engine.export.graph import CpuTarget, LayerWeights, SegmentBuilder
from engine.export.kv_noise import write_kv_noise
from engine.export.packing import DENSE_BITS, Packer, check_finite, narrowed, pack_auto
from engine.export.panels import PanelsFile, have_panels, panel_blocks
from engine.export.weights_file import (
    StoredArray,
    StoredMatrix,
    WeightsFile,
    decode_array,
    decode_matrix,
)
from engine.importers.checkpoint import Checkpoint

INDEX_FILE = "weights.json"
HEAD_FILE = "cpu_head.onnx"

OnProgress = Callable[[int, int], None]


def segment_file(index: int) -> str:
    return f"cpu_segment_{index:03d}.onnx"


@dataclass(frozen=True, slots=True)
class WrittenModel:
    """`files` are the paths written, relative to the folder; `weight_format` is for people."""

    files: tuple[str, ...]
    weight_format: str


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Where every weight of a decoder lies. `lm_head` is `embed` when they are tied."""

    layers: tuple[LayerWeights, ...]
    final_norm: StoredArray
    embed: StoredMatrix
    lm_head: StoredMatrix


def load_weights(folder: Path) -> DecoderWeights:
    """Where the weights of the bundle in `folder` lie: what graphs for any device are made from.

    Raises BundleError when the index is missing or not one of ours.
    """
    try:
        return _decode_weights(json.loads((folder / INDEX_FILE).read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"its {INDEX_FILE} is damaged ({error})"
        raise BundleError(bundle_problem(folder, folder.name, reason)) from error


def _decode_weights(document: dict[str, Any]) -> DecoderWeights:
    return DecoderWeights(
        layers=tuple(_decode_layer(entry) for entry in document["layers"]),
        final_norm=decode_array(document["final_norm"]),
        embed=decode_matrix(document["embed"]),
        lm_head=decode_matrix(document["lm_head"]),
    )


def _decode_layer(entry: dict[str, Any]) -> LayerWeights:
    """Matrices tell themselves from vectors by their bits."""
    parts: dict[str, Any] = {
        name: part and (decode_matrix(part) if "bits" in part else decode_array(part))
        for name, part in entry.items()
    }
    return LayerWeights(**parts)


def write_model(
    checkpoint: Checkpoint, folder: Path, on_progress: OnProgress, packer: Packer = pack_auto
) -> WrittenModel:
    """`on_progress(done, total)` counts layers, the embedding being the last.

    Raises ImportFailed for a tensor that is missing or cannot be packed, OSError for a full disk.
    """
    with WeightsFile(folder / WEIGHTS_FILE) as file, PanelsFile(folder) as panels:
        writer = WeightsWriter(checkpoint, packer, file, panels)
        weights = _write_weights(writer, on_progress)
    (folder / INDEX_FILE).write_text(json.dumps(asdict(weights)), "utf-8")
    panel_files = panels.finish()
    files = [WEIGHTS_FILE, INDEX_FILE, *panel_files]
    files.append(write_kv_noise(checkpoint.config, weights.layers, folder))
    for name, graph in _graphs(checkpoint.config, weights).items():
        (folder / name).write_bytes(graph.SerializeToString())
        files.append(name)
    bits = panels.layer_bits() if panel_files else {layer.gate_up.bits for layer in weights.layers}
    return WrittenModel(tuple(files), _weight_format(bits))


@dataclass(frozen=True, slots=True)
class WeightsWriter:
    """Packs a checkpoint's tensors into the two files of weights."""

    checkpoint: Checkpoint
    packer: Packer
    file: WeightsFile
    panels: PanelsFile

    def vector(self, name: str) -> StoredArray:
        tensor = self.checkpoint.tensor(name)
        values = tensor.dequantize()
        check_finite(tensor, values)
        return self.file.append(name, values)

    def optional_vector(self, name: str) -> StoredArray | None:
        return self.vector(name) if name in self.checkpoint else None

    def matrix(self, name: str, parts: Sequence[str], with_panels: bool = True) -> StoredMatrix:
        """The parts one below the other; panels are for what is multiplied with."""
        tensors = [self.checkpoint.tensor(part) for part in parts]
        packed = narrowed(self.packer(name, tensors))
        if with_panels and have_panels(self.checkpoint.config):
            blocks = panel_blocks(tensors, packed, keep_minima=self.packer is pack_auto)
            self.panels.append(name, blocks)
        return StoredMatrix(
            bits=packed.bits,
            num_rows=packed.num_rows,
            num_cols=packed.num_cols,
            data=self.file.append(f"{name}.data", packed.data),
            scales=self._array(f"{name}.scales", packed.scales),
            block_size=packed.block_size,
            zero_points=self._array(f"{name}.zero_points", packed.zero_points),
            bias=self._array(f"{name}.bias", _stacked_bias(self.checkpoint, parts)),
        )

    def _array(self, name: str, array: NDArray[np.generic] | None) -> StoredArray | None:
        return None if array is None else self.file.append(name, array)


def _write_weights(writer: WeightsWriter, on_progress: OnProgress) -> DecoderWeights:
    num_layers = writer.checkpoint.config.num_layers
    layers = []
    for i in range(num_layers):
        layers.append(_write_layer(writer, f"layers.{i}."))
        on_progress(i + 1, num_layers + 1)
    final_norm = writer.vector("final_norm")
    untied = "lm_head" in writer.checkpoint
    embed = writer.matrix("embed", ["embed"], with_panels=not untied)
    lm_head = writer.matrix("lm_head", ["lm_head"]) if untied else embed
    on_progress(num_layers + 1, num_layers + 1)
    return DecoderWeights(tuple(layers), final_norm, embed, lm_head)


def _write_layer(writer: WeightsWriter, prefix: str) -> LayerWeights:
    def matrix(name: str, *parts: str) -> StoredMatrix:
        return writer.matrix(prefix + name, [prefix + part for part in parts])

    return LayerWeights(
        qkv=matrix("qkv", "q", "k", "v"),
        o=matrix("o", "o"),
        gate_up=matrix("gate_up", "gate", "up"),
        down=matrix("down", "down"),
        attn_norm=writer.optional_vector(prefix + "attn_norm"),
        mlp_norm=writer.optional_vector(prefix + "mlp_norm"),
        post_attn_norm=writer.optional_vector(prefix + "post_attn_norm"),
        post_mlp_norm=writer.optional_vector(prefix + "post_mlp_norm"),
        q_norm=writer.optional_vector(prefix + "q_norm"),
        k_norm=writer.optional_vector(prefix + "k_norm"),
    )


def _stacked_bias(checkpoint: Checkpoint, parts: Sequence[str]) -> NDArray[np.float32] | None:
    """The parts' biases one after another, zeros where a part has none; None if no part has."""
    if not any(f"{part}_bias" in checkpoint for part in parts):
        return None
    return np.concatenate([_bias(checkpoint, part) for part in parts])


def _bias(checkpoint: Checkpoint, part: str) -> NDArray[np.float32]:
    if f"{part}_bias" not in checkpoint:
        return np.zeros(checkpoint.tensor(part).shape[0], np.float32)
    tensor = checkpoint.tensor(f"{part}_bias")
    values = tensor.dequantize()
    check_finite(tensor, values)
    return values


def _graphs(config: ModelConfig, weights: DecoderWeights) -> dict[str, onnx.ModelProto]:
    """File name → graph. ONNX Runtime wants external data beside the graph or below it."""
    builder = SegmentBuilder(config, CpuTarget(), WEIGHTS_FILE)
    layers = weights.layers
    graphs = {segment_file(0): builder.first(layers[0])}
    for i in range(1, config.num_layers):
        graphs[segment_file(i)] = builder.middle(i, layers[i - 1], layers[i])
    graphs[segment_file(config.num_layers)] = builder.last(layers[-1])
    graphs[HEAD_FILE] = builder.head(weights.final_norm, weights.lm_head)
    return graphs


def _weight_format(bits: set[int]) -> str:
    """Of the layers' matrices, as the CPU computes with them."""
    names = {4: "int4", 8: "int8", DENSE_BITS: "f32"}
    return "/".join(names[width] for width in sorted(bits))
