"""Fused graphs: several layers with their attention inside, for devices whose calls are dear.

    hidden, mask, cos, sin, and for each layer the keys and values of earlier tokens
        → norm, qkv, rotation, attention over (earlier tokens, these tokens), MLP  for each layer
        → hidden, and for each layer the new keys and values

The earlier tokens of all sequences lie side by side in one window of W columns, and so do the T new
ones behind them; the mask says which column a row may see. That makes packing, ragged lengths,
causality and sliding windows a matter of numbers that the host writes, and the shapes static.
What goes into an operator and in which order is `graph.SegmentBuilder`'s; here is the attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from engine.architectures.config import LayerConfig, ModelConfig
from engine.export.graph import GraphBuilder, LayerWeights, SegmentBuilder, Shape


def mask_name(window: int) -> str:
    """The input that holds the mask of the layers with this window (0: no limit)."""
    return f"mask_{window}"


def rope_names(rope: int) -> tuple[str, str]:
    """The inputs that hold cosines and sines of the rotation `ModelConfig.ropes[rope]`."""
    return f"cos_{rope}", f"sin_{rope}"


def window_names(layer: int) -> tuple[str, str]:
    """The inputs that hold the earlier tokens' keys [KV, D, W] and values [KV, W, D]."""
    return f"keys_{layer}", f"values_{layer}"


def new_rows_name(layer: int) -> str:
    """The output with the new keys, not rotated, and values of a layer: [1, T, 2 * KV * D]."""
    return f"new_rows_{layer}"


@dataclass(frozen=True, slots=True)
class FusedBuilder(SegmentBuilder):
    """Graphs of runs of layers, for T tokens (the target's) and W earlier ones."""

    window: int = 0

    def layers(self, first: int, weights: Sequence[LayerWeights]) -> onnx.ModelProto:
        """Layers `first`, `first` + 1, …, one for each of `weights`."""
        graph = GraphBuilder(self.weights_location)
        hidden = "hidden"
        outputs: dict[str, tuple[str, Shape]] = {}
        for index, layer in enumerate(weights, first):
            hidden, rows = self._layer(graph, index, layer, hidden)
            outputs[new_rows_name(index)] = rows, self._shape(new_rows_size(self.config))
        outputs["hidden_out"] = hidden, self._shape(self.config.hidden_size)
        indices = range(first, first + len(weights))
        inputs = self._hidden_input() | input_shapes(
            self.config, indices, int(self.target.num_tokens), self.window
        )
        return graph.model(f"fused_{first}", inputs, outputs, self.target.opset)

    def _layer(
        self, graph: GraphBuilder, index: int, layer: LayerWeights, hidden: str
    ) -> tuple[str, str]:
        """(the hidden state after the layer, the new keys and values)."""
        normed = hidden
        if layer.attn_norm is not None:
            normed = self.target.norm(graph, hidden, layer.attn_norm, self.config.rms_norm_eps)
        query_size = self.config.num_heads * self.config.head_size
        sizes = np.array([query_size, new_rows_size(self.config)], np.int64)
        qkv = self._qkv(graph, normed, layer)
        q, rows = graph.node("Split", [qkv, graph.constant(sizes)], count=2, axis=-1)
        attention = self._attention(graph, index, q, rows)
        mlp, residual = self._mlp(graph, layer, attention, hidden)
        return self.target.add(graph, mlp, residual), rows

    def _attention(self, graph: GraphBuilder, index: int, q: str, rows: str) -> str:
        """Softmax attention of the queries over the window and the new rows: [1, T, H * D]."""
        c, layer = self.config, self.config.layers[index]
        k, v = graph.node("Split", [rows], count=2, axis=-1, num_outputs=2)
        q = self._rotate(graph, layer, q, c.num_heads)
        k = self._rotate(graph, layer, k, c.num_kv_heads)
        group = c.num_heads // c.num_kv_heads
        num_tokens = int(self.target.num_tokens)
        q = self._by_head(graph, q, c.num_heads, (0, 2, 1, 3))  # [1, H, T, D]
        q = _reshape(graph, q, (c.num_kv_heads, group * num_tokens, c.head_size))
        new_keys = self._by_head(graph, k, c.num_kv_heads, (0, 2, 3, 1))  # [1, KV, D, T]
        new_keys = _reshape(graph, new_keys, (c.num_kv_heads, c.head_size, num_tokens))
        new_values = self._by_head(graph, v, c.num_kv_heads, (0, 2, 1, 3))
        new_values = _reshape(graph, new_values, (c.num_kv_heads, num_tokens, c.head_size))
        keys, values = window_names(index)
        keys = graph.node("Concat", [keys, new_keys], axis=2)[0]
        values = graph.node("Concat", [values, new_values], axis=1)[0]
        scores = graph.node("MatMul", [self.target.scale(graph, q, c.attention_scale), keys])[0]
        if c.attention_softcap:
            scores = self.target.softcap(graph, scores, c.attention_softcap)
        weights = self._softmax(graph, scores, mask_name(layer.window))
        attended = graph.node("MatMul", [weights, values])[0]  # [KV, G * T, D]
        attended = _reshape(graph, attended, (1, c.num_heads, num_tokens, c.head_size))
        attended = graph.node("Transpose", [attended], perm=[0, 2, 1, 3])[0]
        return _reshape(graph, attended, (1, num_tokens, c.num_heads * c.head_size))

    def _rotate(self, graph: GraphBuilder, layer: LayerConfig, x: str, num_heads: int) -> str:
        rope = self.config.ropes[layer.rope]
        if not rope.frequencies:
            return x
        return graph.node(
            "RotaryEmbedding",
            [x, *rope_names(layer.rope)],
            num_heads=num_heads,
            rotary_embedding_dim=0
            if rope.rotary_size == self.config.head_size
            else rope.rotary_size,
        )[0]

    def _by_head(self, graph: GraphBuilder, x: str, num_heads: int, order: tuple[int, ...]) -> str:
        shape = (1, int(self.target.num_tokens), num_heads, self.config.head_size)
        return graph.node("Transpose", [_reshape(graph, x, shape)], perm=list(order))[0]

    def _softmax(self, graph: GraphBuilder, scores: str, mask: str) -> str:
        """Of scores [KV, G * T, W + T] with the mask [1, T, W + T] added to each head."""
        c, num_tokens = self.config, int(self.target.num_tokens)
        width = self.window + num_tokens
        scores = _reshape(graph, scores, (c.num_heads, num_tokens, width))
        weights = graph.node("Softmax", [self.target.add(graph, scores, mask)], axis=-1)[0]
        group = c.num_heads // c.num_kv_heads
        return _reshape(graph, weights, (c.num_kv_heads, group * num_tokens, width))


def new_rows_size(config: ModelConfig) -> int:
    """New keys and values of one token and layer, in elements."""
    return 2 * config.num_kv_heads * config.head_size


def input_shapes(
    config: ModelConfig, layers: Sequence[int], num_tokens: int, window: int
) -> dict[str, Shape]:
    """All inputs of a fused graph of these layers but `hidden`, by name."""
    shapes: dict[str, Shape] = {}
    for index in layers:
        layer = config.layers[index]
        shapes[mask_name(layer.window)] = (1, num_tokens, window + num_tokens)
        half = len(config.ropes[layer.rope].frequencies)
        if half:
            shapes |= dict.fromkeys(rope_names(layer.rope), (1, num_tokens, half))
        keys, values = window_names(index)
        shapes[keys] = (config.num_kv_heads, config.head_size, window)
        shapes[values] = (config.num_kv_heads, window, config.head_size)
    return shapes


def _reshape(graph: GraphBuilder, x: str, shape: tuple[int, ...]) -> str:
    return graph.node("Reshape", [x, graph.constant(np.array(shape, np.int64))])[0]
