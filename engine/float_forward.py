"""A model in float32, one layer at a time: what everything that is quantized is measured against.

The segments are those that the engine runs (`export.graph`), so every architecture that can be
served has one; only their weights are fed in at each call instead of lying in the graph. At no
time is more than one layer's weights in memory. Knows neither text nor quantization.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from engine.batch import Batch, Float32Array, Int32Array
from engine.export.graph import CpuTarget, GraphBuilder, LayerWeights, SegmentBuilder
from engine.export.packing import DENSE_BITS
from engine.export.weights_file import StoredArray, StoredMatrix
from engine.importers.checkpoint import Checkpoint
from engine.kernels.attention_kernel import KernelAttention
from engine.kv_cache import PagedKVCache
from engine.kv_format import BLOCK_SIZE, F32
from engine.layer_tensors import STACKS, layer_prefix, read_bias, read_stack, read_vectors
from engine.session import CallableSession, open_callable


@dataclass(frozen=True, slots=True)
class Activations:
    """Between two layers, over all T tokens: what is enough to go on from here.

    `hidden` [T, hidden], `qkv` [T, (H + 2 * KV) * D], and `qkv_inputs` [T, hidden], all of the
    layer that comes next.
    """

    hidden: Float32Array
    qkv: Float32Array
    qkv_inputs: Float32Array


@dataclass(frozen=True, slots=True)
class LayerResult:
    """What follows a layer's attention: the `inputs` [T, K] of its MLP's stacks, the hidden state
    [T, hidden] behind it, and where the next layer begins (None after the last)."""

    inputs: Mapping[str, Float32Array]
    hidden: Float32Array
    following: Activations | None


@dataclass(frozen=True, slots=True)
class _CapturingTarget(CpuTarget):
    """Remembers which value each matrix reads."""

    captured: dict[str, str] = field(default_factory=dict)

    def matmul(self, graph: GraphBuilder, x: str, weight: StoredMatrix) -> str:
        self.captured[weight.data.name] = x
        return CpuTarget.matmul(self, graph, x, weight)


class FloatForward:
    """One pass over S texts of T' tokens each, cut at the attentions; T = S * T' below."""

    def __init__(self, checkpoint: Checkpoint, token_ids: Int32Array, num_threads: int) -> None:
        """`token_ids` [S, T']."""
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._token_ids = token_ids
        self._batch = _batch(token_ids)
        self._num_threads = num_threads

    def first(self) -> Activations:
        """Embedding and segment 0."""
        hidden = self._embedded()
        target = _CapturingTarget()
        weights = _described(self._checkpoint, 0)
        outputs = self._run(SegmentBuilder(self._config, target, "").first(weights), target, hidden)
        return Activations(hidden, outputs["qkv"], _read(outputs, target, weights.qkv, hidden))

    def attention(self, layer: int, qkv: Float32Array) -> Float32Array:
        """[T, H * D], with pages of one layer that are gone afterwards."""
        config = replace(self._config, layers=(self._config.layers[layer],))
        num_tokens, length = self._batch.num_tokens, self._token_ids.shape[1]
        kernel = KernelAttention(config, F32, length, num_tokens, self._num_threads)
        pages = PagedKVCache(config, F32, self._batch.block_tables.size).layers[0]
        out = np.empty((num_tokens, config.num_heads * config.head_size), np.float32)
        kernel.begin(self._batch)(qkv, pages, out)
        return out

    def rest(self, layer: int, hidden: Float32Array, attention: Float32Array) -> LayerResult:
        """Segment `layer + 1`."""
        target = _CapturingTarget()
        builder = SegmentBuilder(self._config, target, "")
        weights = _described(self._checkpoint, layer)
        is_last = layer + 1 == self._config.num_layers
        following = None if is_last else _described(self._checkpoint, layer + 1)
        graph = (
            builder.last(weights)
            if following is None
            else builder.middle(layer + 1, weights, following)
        )
        outputs = self._run(graph, target, hidden, attention)
        new_hidden = outputs["hidden_out"]
        inputs = {
            "gate_up": _read(outputs, target, weights.gate_up, new_hidden),
            "down": _read(outputs, target, weights.down, new_hidden),
        }
        if following is None:
            return LayerResult(inputs, new_hidden, None)
        qkv_inputs = _read(outputs, target, following.qkv, new_hidden)
        return LayerResult(inputs, new_hidden, Activations(new_hidden, outputs["qkv"], qkv_inputs))

    def logits(self, hidden: Float32Array, max_rows: int) -> Iterator[Float32Array]:
        """Of all tokens, at most `max_rows` of one text at a time: [R, V]."""
        session, feeds = self._open_head()
        length = self._token_ids.shape[1]
        for text in range(0, len(hidden), length):
            for start in range(text, text + length, max_rows):
                rows = hidden[start : min(start + max_rows, text + length)]
                yield session.run_all({**feeds, "hidden": rows[None]})["logits"][0]

    def _embedded(self) -> Float32Array:
        embed = self._checkpoint.tensor("embed")
        unique, places = np.unique(self._token_ids, return_inverse=True)
        rows = np.concatenate([embed.rows(int(i), int(i) + 1) for i in unique])
        scale = np.float32(self._config.embedding_scale)
        return np.asarray(rows[places.reshape(-1)] * scale, np.float32)

    def _open_head(self) -> tuple[CallableSession, dict[str, NDArray[np.float32]]]:
        """The head and its weights."""
        name = "lm_head" if "lm_head" in self._checkpoint else "embed"
        num_rows, num_cols = self._checkpoint.tensor(name).shape
        shape = (num_cols, num_rows)
        data = StoredArray(name, "float32", shape, offset=0, num_bytes=0)
        matrix = StoredMatrix(DENSE_BITS, num_rows, num_cols, data, scales=None)
        norm = StoredArray("final_norm", "float32", (num_cols,), offset=0, num_bytes=0)
        graph = SegmentBuilder(self._config, CpuTarget(), "").head(norm, matrix)
        feeds = {name: _read_weight(self._checkpoint, name) for name in _feed_weights(graph)}
        return open_callable(graph.SerializeToString(), self._num_threads), feeds

    def _run(
        self,
        graph: onnx.ModelProto,
        target: _CapturingTarget,
        hidden: Float32Array,
        attention: Float32Array | None = None,
    ) -> dict[str, Float32Array]:
        """All outputs and captured values by name, [T, K] each."""
        names = _feed_weights(graph)
        _add_outputs(graph, target.captured.values())
        feeds = {name: _read_weight(self._checkpoint, name) for name in names}
        feeds["hidden"] = hidden[None]
        if attention is not None:
            feeds["attention"] = attention[None]
        session = open_callable(graph.SerializeToString(), self._num_threads)
        return {name: value[0] for name, value in session.run_all(feeds).items()}


def _read(
    outputs: Mapping[str, Float32Array],
    target: _CapturingTarget,
    matrix: StoredMatrix,
    hidden: Float32Array,
) -> Float32Array:
    """What `matrix` read. A graph's own input is no output; only `hidden` is read that way."""
    return outputs.get(target.captured[matrix.data.name], hidden)


def _batch(token_ids: Int32Array) -> Batch:
    """S texts from their beginnings, each in blocks of its own."""
    num_texts, length = token_ids.shape
    blocks_each = -(-length // BLOCK_SIZE)
    tables = np.arange(num_texts * blocks_each, dtype=np.int32).reshape(num_texts, blocks_each)
    positions = np.arange(length, dtype=np.int32)
    slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return Batch(
        token_ids=token_ids.reshape(-1),
        positions=np.tile(positions, num_texts),
        slot_mapping=slots.reshape(-1).astype(np.int32),
        query_starts=np.arange(num_texts + 1, dtype=np.int32) * np.int32(length),
        context_lens=np.full(num_texts, length, np.int32),
        block_tables=tables,
        logits_rows=np.zeros(0, np.int32),
    )


def _described(checkpoint: Checkpoint, layer: int) -> LayerWeights:
    """The shapes of a layer's weights. They lie nowhere: `_feed_weights` makes inputs of them."""
    prefix = layer_prefix(layer)

    def array(name: str, *shape: int) -> StoredArray:
        return StoredArray(prefix + name, "float32", shape, offset=0, num_bytes=0)

    def matrix(stack: str) -> StoredMatrix:
        shapes = [checkpoint.tensor(prefix + part).shape for part in STACKS[stack]]
        num_rows, num_cols = sum(shape[0] for shape in shapes), shapes[0][1]
        has_bias = any(f"{prefix}{part}_bias" in checkpoint for part in STACKS[stack])
        return StoredMatrix(
            bits=DENSE_BITS,
            num_rows=num_rows,
            num_cols=num_cols,
            data=array(stack, num_cols, num_rows),
            scales=None,
            bias=array(f"{stack}.bias", num_rows) if has_bias else None,
        )

    parts: dict[str, Any] = {stack: matrix(stack) for stack in STACKS}
    for name, values in read_vectors(checkpoint, layer).items():
        parts[name] = array(name, *values.shape)
    return LayerWeights(**parts)


def _feed_weights(graph: onnx.ModelProto) -> list[str]:
    """Turns the weights of a graph into inputs and returns their names."""
    weights = [
        weight
        for weight in graph.graph.initializer
        if weight.data_location == onnx.TensorProto.EXTERNAL
    ]
    for weight in weights:
        graph.graph.initializer.remove(weight)
        graph.graph.input.append(
            onnx.helper.make_tensor_value_info(weight.name, weight.data_type, list(weight.dims))
        )
    return [weight.name for weight in weights]


def _add_outputs(graph: onnx.ModelProto, names: Iterable[str]) -> None:
    """Makes outputs of inner values; what is an input already stays one."""
    inputs = {value.name for value in graph.graph.input}
    for name in sorted(set(names) - inputs):
        value = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        graph.graph.output.append(value)


def _read_weight(checkpoint: Checkpoint, name: str) -> NDArray[np.float32]:
    """`layers.3.qkv` [K, N], `layers.3.qkv.bias` [N], a vector of layer 3; or one of the head."""
    if not name.startswith("layers."):
        return checkpoint.tensor(name).dequantize().T
    _, layer, rest = name.split(".", 2)
    if rest in STACKS:
        return read_stack(checkpoint, int(layer), rest).T
    stack, _, kind = rest.partition(".")
    if kind == "bias":
        bias = read_bias(checkpoint, int(layer), stack)
        assert bias is not None
        return bias
    return checkpoint.tensor(name).dequantize()
