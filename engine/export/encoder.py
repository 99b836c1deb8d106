"""Writes an encoder's weights and its one graph, from token ids to embeddings, into a folder.

    token_ids [B, S] int32, positions [S] int32, mask [B, S] float32 (1 token, 0 padding)
        → embeddings [B, hidden] float32, of length 1

A cross-encoder also reads which tokens are the document's, second [B, S] float32, and gives
scores [B, 1] float32: logits.

Standard operators and float32 throughout. Padding is cut off in the attention, by a score that
no softmax sees, and in the pooling. Does not know the rest of the bundle (`exporter.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from engine.architectures.encoder import EncoderConfig
from engine.bundle import ENCODER_FILE, WEIGHTS_FILE
from engine.export.graph import GraphBuilder, Shape
from engine.export.model import WrittenModel
from engine.export.weights_file import StoredArray, WeightsFile

OPSET = 21
HIDDEN_SCORE = -1e30
"""Added to the scores of padding. Finite, so that no row can turn into NaN."""

MIN_LENGTH = 1e-12
WEIGHT_FORMAT = "f32"
_KINDS = ("weight", "bias")

OnProgress = Callable[[int, int], None]
Weights = dict[str, StoredArray]


class EncoderTensors(Protocol):
    @property
    def config(self) -> EncoderConfig: ...

    def tensor(self, name: str) -> NDArray[np.float32]:
        """By the canonical names of `encoder_shapes`."""
        ...


def write_encoder(
    checkpoint: EncoderTensors, folder: Path, on_progress: OnProgress
) -> WrittenModel:
    """`on_progress(done, total)` counts layers and the embedding.

    Raises ImportFailed for a tensor that cannot be used, OSError for a full disk.
    """
    with WeightsFile(folder / WEIGHTS_FILE) as file:
        weights = _write_weights(checkpoint, file, on_progress)
    graph = _EncoderGraph(checkpoint.config, weights).build()
    (folder / ENCODER_FILE).write_bytes(graph.SerializeToString())
    return WrittenModel((WEIGHTS_FILE, ENCODER_FILE), WEIGHT_FORMAT)


def _write_weights(
    checkpoint: EncoderTensors, file: WeightsFile, on_progress: OnProgress
) -> Weights:
    """Matrices lie as [inputs, outputs], which is how MatMul reads them."""
    weights: Weights = {}

    def write(name: str, value: NDArray[np.float32]) -> None:
        weights[name] = file.append(name, value)

    total = checkpoint.config.num_layers + 1
    for name in ("embed", "position_embed", "embed_norm.weight", "embed_norm.bias"):
        write(name, checkpoint.tensor(name))
    on_progress(1, total)
    for layer in range(checkpoint.config.num_layers):
        prefix = f"layers.{layer}."
        for kind in _KINDS:
            parts = [checkpoint.tensor(f"{prefix}{part}.{kind}") for part in ("q", "k", "v")]
            write(f"{prefix}qkv.{kind}", np.concatenate(parts).T)
            for name in ("o", "up", "down", "attn_norm", "mlp_norm"):
                write(f"{prefix}{name}.{kind}", checkpoint.tensor(f"{prefix}{name}.{kind}").T)
        on_progress(layer + 2, total)
    if checkpoint.config.is_cross_encoder:
        for name in ("second_type", *(f"{p}.{k}" for p in ("pooler", "score") for k in _KINDS)):
            write(name, checkpoint.tensor(name).T)
    return weights


class _EncoderGraph:
    def __init__(self, config: EncoderConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights
        self._graph = GraphBuilder(WEIGHTS_FILE)

    def build(self) -> onnx.ModelProto:
        hidden = self._embeddings()
        scores = self._mask_scores()
        for layer in range(self._config.num_layers):
            hidden = self._layer(hidden, scores, f"layers.{layer}.")
        inputs: dict[str, Shape] = {"mask": ("B", "S")}
        if self._config.is_cross_encoder:
            inputs["second"] = ("B", "S")
            name, result = "scores", self._scores(hidden)
        else:
            name, result = "embeddings", self._normalized(self._pooled(hidden))
        return self._graph.model(
            "encoder",
            inputs,
            {name: (result, ("B", self._config.output_size))},
            OPSET,
            int32_inputs={"token_ids": ("B", "S"), "positions": ("S",)},
        )

    def _embeddings(self) -> str:
        tokens = self._node("Gather", self._stored("embed"), "token_ids")
        places = self._node("Gather", self._stored("position_embed"), "positions")
        summed = self._node("Add", tokens, places)
        if self._config.is_cross_encoder:
            second = self._node("Unsqueeze", "second", self._integers(2))
            types = self._node("Mul", second, self._stored("second_type"))
            summed = self._node("Add", summed, types)
        return self._norm(summed, "embed_norm")

    def _mask_scores(self) -> str:
        """[B, 1, 1, S]: 0 for a token, `HIDDEN_SCORE` for padding."""
        one = self._scalar(1.0)
        padding = self._node("Sub", one, "mask")
        scores = self._node("Mul", padding, self._scalar(HIDDEN_SCORE))
        return self._node("Unsqueeze", scores, self._integers(1, 2))

    def _layer(self, hidden: str, mask_scores: str, prefix: str) -> str:
        attention = self._dense(self._attention(hidden, mask_scores, prefix), prefix + "o")
        hidden = self._norm(self._node("Add", attention, hidden), prefix + "attn_norm")
        approximate = "tanh" if self._config.activation == "gelu_tanh" else "none"
        up = self._dense(hidden, prefix + "up")
        activated = self._graph.node("Gelu", [up], approximate=approximate)[0]
        down = self._dense(activated, prefix + "down")
        return self._norm(self._node("Add", down, hidden), prefix + "mlp_norm")

    def _attention(self, hidden: str, mask_scores: str, prefix: str) -> str:
        """[B, S, hidden] → [B, S, hidden]; every token sees every token of its text."""
        heads, size = self._config.num_heads, self._config.head_size
        qkv = self._dense(hidden, prefix + "qkv")
        split = self._node("Reshape", qkv, self._integers(0, 0, 3, heads, size))
        parts = self._graph.node("Split", [split], count=3, axis=2, num_outputs=3)
        query, key, value = (self._node("Squeeze", p, self._integers(2)) for p in parts)
        query, value = (self._transposed(part, 0, 2, 1, 3) for part in (query, value))
        query = self._node("Mul", query, self._scalar(size**-0.5))
        scores = self._node("MatMul", query, self._transposed(key, 0, 2, 3, 1))  # [B, H, S, S]
        masked = self._node("Add", scores, mask_scores)
        weights = self._graph.node("Softmax", [masked], axis=-1)[0]
        mixed = self._transposed(self._node("MatMul", weights, value), 0, 2, 1, 3)
        return self._node("Reshape", mixed, self._integers(0, 0, heads * size))

    def _pooled(self, hidden: str) -> str:
        if self._config.pooling == "cls":
            return self._graph.node("Gather", [hidden, self._index(0)], axis=1)[0]
        weights = self._node("Unsqueeze", "mask", self._integers(2))
        kept = self._node("Mul", hidden, weights)
        total = self._graph.node("ReduceSum", [kept, self._integers(1)], keepdims=0)[0]
        count = self._graph.node("ReduceSum", ["mask", self._integers(1)], keepdims=1)[0]
        return self._node("Div", total, count)

    def _scores(self, hidden: str) -> str:
        first = self._graph.node("Gather", [hidden, self._index(0)], axis=1)[0]
        pooled = self._node("Tanh", self._dense(first, "pooler"))
        return self._dense(pooled, "score")

    def _normalized(self, pooled: str) -> str:
        length = self._graph.node("ReduceL2", [pooled, self._integers(1)], keepdims=1)[0]
        return self._node("Div", pooled, self._node("Max", length, self._scalar(MIN_LENGTH)))

    def _dense(self, x: str, name: str) -> str:
        product = self._node("MatMul", x, self._stored(f"{name}.weight"))
        return self._node("Add", product, self._stored(f"{name}.bias"))

    def _norm(self, x: str, name: str) -> str:
        inputs = [x, self._stored(f"{name}.weight"), self._stored(f"{name}.bias")]
        epsilon = self._config.layer_norm_eps
        return self._graph.node("LayerNormalization", inputs, axis=-1, epsilon=epsilon)[0]

    def _transposed(self, x: str, *order: int) -> str:
        return self._graph.node("Transpose", [x], perm=list(order))[0]

    def _node(self, op_type: str, *inputs: str) -> str:
        return self._graph.node(op_type, inputs)[0]

    def _stored(self, name: str) -> str:
        return self._graph.stored(self._weights[name])

    def _scalar(self, value: float) -> str:
        return self._graph.constant(np.array(value, np.float32))

    def _index(self, value: int) -> str:
        return self._graph.constant(np.array(value, np.int64))

    def _integers(self, *values: int) -> str:
        return self._graph.constant(np.array(values, np.int64))
