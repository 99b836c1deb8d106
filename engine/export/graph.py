"""Segment graphs: the pieces of a decoder between its attentions.

    segment 0      hidden                 → norm, qkv projection            → qkv
    segment i      attention, hidden      → output projection, MLP, norm,
                                            qkv projection of layer i       → hidden, qkv
    segment L      attention, hidden      → output projection, MLP          → hidden
    head           hidden                 → final norm, vocabulary          → logits

All activations are [1, T, K] float32 and T is the only free dimension. What a device wants
written differently is a `Target`; the order of the operations is here and nowhere else.
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
from engine.export.packing import BLOCK_SIZE
from engine.export.weights_file import StoredArray, StoredMatrix

Shape = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attn_norm: StoredArray
    qkv: StoredMatrix
    o: StoredMatrix
    mlp_norm: StoredArray
    gate_up: StoredMatrix
    down: StoredMatrix


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

    def matmul(self, graph: GraphBuilder, x: str, weight: StoredMatrix) -> str: ...

    def norm(self, graph: GraphBuilder, x: str, weight: StoredArray, epsilon: float) -> str: ...

    def add_norm(
        self, graph: GraphBuilder, x: str, residual: str, weight: StoredArray, epsilon: float
    ) -> tuple[str, str]:
        """(x + residual, its norm)."""
        ...

    def gated_silu(self, graph: GraphBuilder, gate_up: str) -> str:
        """silu(first half) * second half, along the last axis."""
        ...


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """ONNX Runtime's CPU provider: int8 activations (accuracy level 4), fused contrib operators."""

    opset: int = 21
    num_tokens: int | str = "T"

    def matmul(self, graph: GraphBuilder, x: str, weight: StoredMatrix) -> str:
        return graph.node(
            "MatMulNBits",
            [x, graph.stored(weight.data), graph.stored(weight.scales)],
            domain="com.microsoft",
            K=weight.num_cols,
            N=weight.num_rows,
            bits=weight.bits,
            block_size=BLOCK_SIZE,
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

    def gated_silu(self, graph: GraphBuilder, gate_up: str) -> str:
        gate, up = graph.node("Split", [gate_up], count=2, axis=-1, num_outputs=2)
        silu = graph.node("QuickGelu", [gate], domain="com.microsoft", alpha=1.0)[0]
        return graph.node("Mul", [silu, up])[0]


@dataclass(frozen=True, slots=True)
class SegmentBuilder:
    """All graphs of one model for one target."""

    config: ModelConfig
    target: Target
    weights_location: str

    def first(self, layer: LayerWeights) -> onnx.ModelProto:
        graph = GraphBuilder(self.weights_location)
        normed = self.target.norm(graph, "hidden", layer.attn_norm, self.config.rms_norm_eps)
        qkv = self.target.matmul(graph, normed, layer.qkv)
        outputs = {"qkv": (qkv, self._shape(self.config.qkv_size))}
        return graph.model("segment_0", self._hidden_input(), outputs, self.target.opset)

    def middle(self, index: int, layer: LayerWeights, next_layer: LayerWeights) -> onnx.ModelProto:
        graph = GraphBuilder(self.weights_location)
        down, hidden = self._mlp(graph, layer)
        hidden, normed = self.target.add_norm(
            graph, down, hidden, next_layer.attn_norm, self.config.rms_norm_eps
        )
        qkv = self.target.matmul(graph, normed, next_layer.qkv)
        outputs = {
            "hidden_out": (hidden, self._shape(self.config.hidden_size)),
            "qkv": (qkv, self._shape(self.config.qkv_size)),
        }
        return graph.model(f"segment_{index}", self._inputs(), outputs, self.target.opset)

    def last(self, layer: LayerWeights) -> onnx.ModelProto:
        graph = GraphBuilder(self.weights_location)
        down, hidden = self._mlp(graph, layer)
        summed = graph.node("Add", [down, hidden])[0]
        outputs = {"hidden_out": (summed, self._shape(self.config.hidden_size))}
        name = f"segment_{self.config.num_layers}"
        return graph.model(name, self._inputs(), outputs, self.target.opset)

    def head(self, final_norm: StoredArray, lm_head: StoredMatrix) -> onnx.ModelProto:
        graph = GraphBuilder(self.weights_location)
        normed = self.target.norm(graph, "hidden", final_norm, self.config.rms_norm_eps)
        logits = self.target.matmul(graph, normed, lm_head)
        outputs = {"logits": (logits, self._shape(self.config.vocab_size))}
        return graph.model("head", self._hidden_input(), outputs, self.target.opset)

    def _mlp(self, graph: GraphBuilder, layer: LayerWeights) -> tuple[str, str]:
        """The MLP's output and the residual it is still to be added to."""
        attention = self.target.matmul(graph, "attention", layer.o)
        hidden, normed = self.target.add_norm(
            graph, attention, "hidden", layer.mlp_norm, self.config.rms_norm_eps
        )
        gate_up = self.target.matmul(graph, normed, layer.gate_up)
        return self.target.matmul(graph, self.target.gated_silu(graph, gate_up), layer.down), hidden

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
