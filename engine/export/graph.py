"""Segment graphs: the pieces of a decoder between its attentions.

    segment 0      hidden                 → norm, qkv projection            → qkv
    segment i      attention, hidden      → output projection, MLP, norm,
                                            qkv projection of layer i       → hidden, qkv
    segment L      attention, hidden      → output projection, MLP          → hidden
    head           hidden                 → final norm, vocabulary          → logits

All activations are [1, T, K] float32 and T is the only free dimension. What a device wants
written differently is a `Target`; the order of the operations is here and nowhere else. Which
operations an architecture has follows from the weights that its layers have (`LayerWeights`) and
from a few numbers of the config.
Knows nothing of files, sessions or attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from engine.architectures.config import ModelConfig
from engine.export.weights_file import StoredArray, StoredMatrix

Shape = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. What is None is left out of the graphs.

    `attn_norm` and `mlp_norm` come before the attention and the MLP, `post_attn_norm` and
    `post_mlp_norm` after them and before the residual. `q_norm` and `k_norm` have the size of a
    head (norm over each head) or of the whole projection. A bias is a part of its matrix.
    """

    qkv: StoredMatrix
    o: StoredMatrix
    gate_up: StoredMatrix
    down: StoredMatrix
    attn_norm: StoredArray | None = None
    mlp_norm: StoredArray | None = None
    post_attn_norm: StoredArray | None = None
    post_mlp_norm: StoredArray | None = None
    q_norm: StoredArray | None = None
    k_norm: StoredArray | None = None


class GraphBuilder:
    """Nodes, initializers and fresh value names of one graph."""

    def __init__(self, weights_location: str) -> None:
        self._location = weights_location
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}

    def node(
        self,
        op_type: str,
        inputs: Sequence[str],
        count: int = 1,
        domain: str = "",
        **attributes: Any,
    ) -> list[str]:
        """Adds an operator and returns the names of its `count` outputs."""
        outputs = [f"{op_type}_{len(self._nodes)}_{i}" for i in range(count)]
        self._nodes.append(
            helper.make_node(op_type, list(inputs), outputs, domain=domain, **attributes)
        )
        return outputs

    def stored(self, array: StoredArray) -> str:
        """The name of an initializer that lies in the weights file."""
        self._initializers[array.name] = array.initializer(self._location)
        return array.name

    def constant(self, value: NDArray[np.generic]) -> str:
        """The name of a small initializer that is kept in the graph itself."""
        name = f"constant_{len(self._initializers)}"
        self._initializers[name] = numpy_helper.from_array(value, name)
        return name

    def model(
        self,
        name: str,
        inputs: dict[str, Shape],
        outputs: dict[str, tuple[str, Shape]],
        opset: int,
        int32_inputs: dict[str, Shape] | None = None,
    ) -> onnx.ModelProto:
        """`outputs` maps the public name to (inner value, shape)."""
        for public, (inner, _) in outputs.items():
            self._nodes.append(helper.make_node("Identity", [inner], [public]))
        graph = helper.make_graph(
            self._nodes,
            name,
            [
                *(_int32_value(key, shape) for key, shape in (int32_inputs or {}).items()),
                *(_float_value(key, shape) for key, shape in inputs.items()),
            ],
            [_float_value(key, shape) for key, (_, shape) in outputs.items()],
            list(self._initializers.values()),
        )
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, producer_name="hexlm", ir_version=10)


class Target(Protocol):
    """How one device wants the operators written. `num_tokens` is T, or a name when it is free."""

    @property
    def opset(self) -> int: ...

    @property
    def num_tokens(self) -> int | str: ...

    def matmul(self, graph: GraphBuilder, x: str, weight: StoredMatrix) -> str:
        """x times the matrix, plus its bias if it has one."""
        ...

    def norm(self, graph: GraphBuilder, x: str, weight: StoredArray, epsilon: float) -> str: ...

    def head_norm(
        self, graph: GraphBuilder, x: str, weight: StoredArray, epsilon: float, head_size: int
    ) -> str:
        """The norm of each head of x [1, T, heads * head_size]; `weight` [head_size]."""
        ...

    def add(self, graph: GraphBuilder, x: str, y: str) -> str: ...

    def add_norm(
        self, graph: GraphBuilder, x: str, residual: str, weight: StoredArray, epsilon: float
    ) -> tuple[str, str]:
        """(x + residual, its norm)."""
        ...

    def gated(self, graph: GraphBuilder, gate_up: str, activation: str) -> str:
        """activation(first half) * second half, along the last axis: `silu` or `gelu_tanh`."""
        ...

    def scale(self, graph: GraphBuilder, x: str, factor: float) -> str: ...

    def softcap(self, graph: GraphBuilder, x: str, cap: float) -> str:
        """cap * tanh(x / cap)."""
        ...


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """ONNX Runtime's CPU provider: int8 activations (accuracy level 4), fused contrib operators."""

    opset: int = 21
    num_tokens: int | str = "T"

    def matmul(self, graph: GraphBuilder, x: str, weight: StoredMatrix) -> str:
        product = self._product(graph, x, weight)
        if weight.bias is None:
            return product
        return graph.node("Add", [product, graph.stored(weight.bias)])[0]

    def _product(self, graph: GraphBuilder, x: str, weight: StoredMatrix) -> str:
        inputs = [x, graph.stored(weight.data)]
        if weight.scales is None:
            return graph.node("MatMul", inputs)[0]
        inputs.append(graph.stored(weight.scales))
        if weight.zero_points is not None:
            inputs.append(graph.stored(weight.zero_points))
        return graph.node(
            "MatMulNBits",
            inputs,
            domain="com.microsoft",
            K=weight.num_cols,
            N=weight.num_rows,
            bits=weight.bits,
            block_size=weight.block_size,
            accuracy_level=4,
        )[0]

    def norm(self, graph: GraphBuilder, x: str, weight: StoredArray, epsilon: float) -> str:
        inputs = [x, graph.stored(weight)]
        return graph.node("SimplifiedLayerNormalization", inputs, epsilon=epsilon)[0]

    def add_norm(
        self, graph: GraphBuilder, x: str, residual: str, weight: StoredArray, epsilon: float
    ) -> tuple[str, str]:
        outputs = graph.node(
            "SkipSimplifiedLayerNormalization",
            [x, residual, graph.stored(weight)],
            count=4,
            domain="com.microsoft",
            epsilon=epsilon,
        )
        return outputs[3], outputs[0]

    def head_norm(
        self, graph: GraphBuilder, x: str, weight: StoredArray, epsilon: float, head_size: int
    ) -> str:
        heads = graph.node("Reshape", [x, graph.constant(np.array([1, -1, head_size], np.int64))])[
            0
        ]
        normed = self.norm(graph, heads, weight, epsilon)
        return graph.node("Reshape", [normed, graph.node("Shape", [x])[0]])[0]

    def add(self, graph: GraphBuilder, x: str, y: str) -> str:
        return graph.node("Add", [x, y])[0]

    def gated(self, graph: GraphBuilder, gate_up: str, activation: str) -> str:
        gate, up = graph.node("Split", [gate_up], count=2, axis=-1, num_outputs=2)
        if activation == "gelu_tanh":
            active = graph.node("Gelu", [gate], approximate="tanh")[0]
        else:
            active = graph.node("QuickGelu", [gate], domain="com.microsoft", alpha=1.0)[0]
        return graph.node("Mul", [active, up])[0]

    def scale(self, graph: GraphBuilder, x: str, factor: float) -> str:
        return graph.node("Mul", [x, graph.constant(np.array(factor, np.float32))])[0]

    def softcap(self, graph: GraphBuilder, x: str, cap: float) -> str:
        bounded = graph.node("Tanh", [self.scale(graph, x, 1 / cap)])[0]
        return self.scale(graph, bounded, cap)


@dataclass(frozen=True, slots=True)
class SegmentBuilder:
    """All graphs of one model for one target."""

    config: ModelConfig
    target: Target
    weights_location: str

    def first(self, layer: LayerWeights) -> onnx.ModelProto:
        graph = GraphBuilder(self.weights_location)
        normed = "hidden"
        if layer.attn_norm is not None:
            normed = self.target.norm(graph, "hidden", layer.attn_norm, self.config.rms_norm_eps)
        qkv = self._qkv(graph, normed, layer)
        outputs = {"qkv": (qkv, self._shape(self.config.qkv_size))}
        return graph.model("segment_0", self._hidden_input(), outputs, self.target.opset)

    def middle(self, index: int, layer: LayerWeights, next_layer: LayerWeights) -> onnx.ModelProto:
        graph = GraphBuilder(self.weights_location)
        mlp, hidden = self._mlp(graph, layer)
        hidden, normed = self._add_norm(graph, mlp, hidden, next_layer.attn_norm)
        outputs = {
            "hidden_out": (hidden, self._shape(self.config.hidden_size)),
            "qkv": (self._qkv(graph, normed, next_layer), self._shape(self.config.qkv_size)),
        }
        return graph.model(f"segment_{index}", self._inputs(), outputs, self.target.opset)

    def last(self, layer: LayerWeights) -> onnx.ModelProto:
        graph = GraphBuilder(self.weights_location)
        summed = self.target.add(graph, *self._mlp(graph, layer))
        outputs = {"hidden_out": (summed, self._shape(self.config.hidden_size))}
        name = f"segment_{self.config.num_layers}"
        return graph.model(name, self._inputs(), outputs, self.target.opset)

    def head(self, final_norm: StoredArray, lm_head: StoredMatrix) -> onnx.ModelProto:
        graph, config = GraphBuilder(self.weights_location), self.config
        normed = self.target.norm(graph, "hidden", final_norm, config.rms_norm_eps)
        logits = self.target.matmul(graph, normed, lm_head)
        if config.logits_scale != 1:
            logits = self.target.scale(graph, logits, config.logits_scale)
        if config.logits_softcap:
            logits = self.target.softcap(graph, logits, config.logits_softcap)
        outputs = {"logits": (logits, self._shape(config.vocab_size))}
        return graph.model("head", self._hidden_input(), outputs, self.target.opset)

    def _mlp(
        self,
        graph: GraphBuilder,
        layer: LayerWeights,
        attention: str = "attention",
        hidden: str = "hidden",
    ) -> tuple[str, str]:
        """The MLP's output and the residual it is still to be added to."""
        attention = self.target.matmul(graph, attention, layer.o)
        attention = self._before_residual(graph, attention, layer.post_attn_norm)
        hidden, normed = self._add_norm(graph, attention, hidden, layer.mlp_norm)
        gate_up = self.target.matmul(graph, normed, layer.gate_up)
        gated = self.target.gated(graph, gate_up, self.config.activation)
        down = self.target.matmul(graph, gated, layer.down)
        return self._before_residual(graph, down, layer.post_mlp_norm), hidden

    def _before_residual(self, graph: GraphBuilder, x: str, weight: StoredArray | None) -> str:
        if weight is not None:
            x = self.target.norm(graph, x, weight, self.config.rms_norm_eps)
        if self.config.residual_scale != 1:
            x = self.target.scale(graph, x, self.config.residual_scale)
        return x

    def _add_norm(
        self, graph: GraphBuilder, x: str, residual: str, weight: StoredArray | None
    ) -> tuple[str, str]:
        """(x + residual, its norm, or the sum itself where there is none)."""
        if weight is None:
            summed = self.target.add(graph, x, residual)
            return summed, summed
        return self.target.add_norm(graph, x, residual, weight, self.config.rms_norm_eps)

    def _qkv(self, graph: GraphBuilder, x: str, layer: LayerWeights) -> str:
        """Queries, keys and values side by side, queries and keys normed where there are norms."""
        qkv = self.target.matmul(graph, x, layer.qkv)
        if layer.q_norm is None or layer.k_norm is None:
            return qkv
        config = self.config
        heads = np.array([config.num_heads, config.num_kv_heads, config.num_kv_heads], np.int64)
        q, k, v = graph.node(
            "Split", [qkv, graph.constant(heads * config.head_size)], count=3, axis=-1
        )
        q = self._query_key_norm(graph, q, layer.q_norm)
        k = self._query_key_norm(graph, k, layer.k_norm)
        return graph.node("Concat", [q, k, v], axis=-1)[0]

    def _query_key_norm(self, graph: GraphBuilder, x: str, weight: StoredArray) -> str:
        epsilon, head_size = self.config.rms_norm_eps, self.config.head_size
        if weight.shape == (head_size,):
            return self.target.head_norm(graph, x, weight, epsilon, head_size)
        return self.target.norm(graph, x, weight, epsilon)

    def _shape(self, size: int) -> Shape:
        return (1, self.target.num_tokens, size)

    def _hidden_input(self) -> dict[str, Shape]:
        return {"hidden": self._shape(self.config.hidden_size)}

    def _inputs(self) -> dict[str, Shape]:
        size = self.config.num_heads * self.config.head_size
        return {"attention": self._shape(size)} | self._hidden_input()


def _float_value(name: str, shape: Shape) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)


def _int32_value(name: str, shape: Shape) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx.TensorProto.INT32, shape)
