"""Writes a checkpoint's weights and segment graphs into a bundle's folder, tensor by tensor.

At most one stacked matrix (and its packed form) is in memory at a time. Knows nothing of the
rest of the bundle (manifest, tokenizer): that is `exporter.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx

from engine.architectures.config import ModelConfig
from engine.bundle import WEIGHTS_FILE
from engine.export.graph import CpuTarget, LayerWeights, SegmentBuilder
from engine.export.packing import pack
from engine.export.weights_file import StoredArray, StoredMatrix, WeightsFile, write_index
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


def write_model(checkpoint: Checkpoint, folder: Path, on_progress: OnProgress) -> WrittenModel:
    """`on_progress(done, total)` counts layers, the embedding being the last.

    Raises ImportFailed for a tensor that is missing or cannot be packed, OSError for a full disk.
    """
    with WeightsFile(folder / WEIGHTS_FILE) as file:
        weights = _write_weights(checkpoint, file, on_progress)
    write_index(folder / INDEX_FILE, {"embed": weights.embed})
    files = [WEIGHTS_FILE, INDEX_FILE]
    for name, graph in _graphs(checkpoint.config, weights).items():
        (folder / name).write_bytes(graph.SerializeToString())
        files.append(name)
    return WrittenModel(tuple(files), _weight_format(weights))


def _write_weights(
    checkpoint: Checkpoint, file: WeightsFile, on_progress: OnProgress
) -> DecoderWeights:
    total = checkpoint.config.num_layers + 1
    layers = []
    for i in range(checkpoint.config.num_layers):
        layers.append(_write_layer(checkpoint, file, f"layers.{i}."))
        on_progress(i + 1, total)
    final_norm = _write_vector(checkpoint, file, "final_norm")
    embed = _write_matrix(checkpoint, file, "embed", ["embed"])
    untied = "lm_head" in checkpoint
    lm_head = _write_matrix(checkpoint, file, "lm_head", ["lm_head"]) if untied else embed
    on_progress(total, total)
    return DecoderWeights(tuple(layers), final_norm, embed, lm_head)


def _write_layer(checkpoint: Checkpoint, file: WeightsFile, prefix: str) -> LayerWeights:
    def matrix(name: str, *parts: str) -> StoredMatrix:
        return _write_matrix(checkpoint, file, prefix + name, [prefix + part for part in parts])

    return LayerWeights(
        attn_norm=_write_vector(checkpoint, file, prefix + "attn_norm"),
        qkv=matrix("qkv", "q", "k", "v"),
        o=matrix("o", "o"),
        mlp_norm=_write_vector(checkpoint, file, prefix + "mlp_norm"),
        gate_up=matrix("gate_up", "gate", "up"),
        down=matrix("down", "down"),
    )


def _write_vector(checkpoint: Checkpoint, file: WeightsFile, name: str) -> StoredArray:
    return file.append(name, checkpoint.tensor(name).dequantize())


def _write_matrix(
    checkpoint: Checkpoint, file: WeightsFile, name: str, parts: list[str]
) -> StoredMatrix:
    packed = pack([checkpoint.tensor(part) for part in parts])
    return StoredMatrix(
        bits=packed.bits,
        num_rows=packed.num_rows,
        num_cols=packed.num_cols,
        data=file.append(f"{name}.data", packed.data),
        scales=file.append(f"{name}.scales", packed.scales),
    )


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


def _weight_format(weights: DecoderWeights) -> str:
    bits = {layer.gate_up.bits for layer in weights.layers}
    return "int4" if bits == {4} else "int8" if bits == {8} else "int4/int8"
