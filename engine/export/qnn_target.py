"""How the HTP wants segment graphs written: static T, standard operators, biases added after.

What the QNN provider takes was found by compiling for v73 and v81 (docs/npu.md); the tests
compile every form again. Norms stay in rank 3: a rank-4 norm is accepted, but was reported to be
computed wrongly on hardware (onnxruntime/mobius pull request 372).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.export.graph import GraphBuilder
from engine.export.weights_file import StoredArray, StoredMatrix


@dataclass(frozen=True, slots=True)
class QnnTarget:
    """Graphs for exactly `num_tokens` tokens."""

    num_tokens: int
    opset: int = 24

    def matmul(self, graph: GraphBuilder, x: str, weight: StoredMatrix) -> str:
        product = self._product(graph, x, weight)
        if weight.bias is None:
            return product
        return self.add(graph, product, graph.stored(weight.bias))

    def _product(self, graph: GraphBuilder, x: str, weight: StoredMatrix) -> str:
        """A dense matrix is kept as fp16 in the context. HTP wants whole blocks of columns.

        They are filled up with a Concat: behind a Pad the product was garbage (emulator, QAIRT
        2.51; what the padding holds is not set).
        """
        if weight.scales is None:
            return graph.node("MatMul", [x, graph.stored(weight.data)])[0]
        if padding := -weight.num_cols % weight.block_size:
            zeros = graph.constant(np.zeros((1, self.num_tokens, padding), np.float32))
            x = graph.node("Concat", [x, zeros], axis=-1)[0]
        inputs = [x, graph.stored(weight.data), graph.stored(weight.scales)]
        if weight.zero_points is not None:
            inputs.append(graph.stored(weight.zero_points))
        return graph.node(
            "MatMulNBits",
            inputs,
            domain="com.microsoft",
            K=weight.num_cols + padding,
            N=weight.num_rows,
            bits=weight.bits,
            block_size=weight.block_size,
        )[0]

    def norm(self, graph: GraphBuilder, x: str, weight: StoredArray, epsilon: float) -> str:
        return graph.node("RMSNormalization", [x, graph.stored(weight)], epsilon=epsilon)[0]

    def head_norm(
        self, graph: GraphBuilder, x: str, weight: StoredArray, epsilon: float, head_size: int
    ) -> str:
        """All heads of all tokens are rows of one rank-3 norm."""
        rows = self._reshape(graph, x, (1, -1, head_size))
        normed = self.norm(graph, rows, weight, epsilon)
        return self._reshape(graph, normed, (1, self.num_tokens, -1))

    def add(self, graph: GraphBuilder, x: str, y: str) -> str:
        return graph.node("Add", [x, y])[0]

    def add_norm(
        self, graph: GraphBuilder, x: str, residual: str, weight: StoredArray, epsilon: float
    ) -> tuple[str, str]:
        summed = self.add(graph, x, residual)
        return summed, self.norm(graph, summed, weight, epsilon)

    def gated(self, graph: GraphBuilder, gate_up: str, activation: str) -> str:
        gate, up = graph.node("Split", [gate_up], count=2, axis=-1, num_outputs=2)
        if activation == "gelu_tanh":
            active = graph.node("Gelu", [gate], approximate="tanh")[0]
        else:
            active = graph.node("Swish", [gate])[0]
        return graph.node("Mul", [active, up])[0]

    def scale(self, graph: GraphBuilder, x: str, factor: float) -> str:
        return graph.node("Mul", [x, graph.constant(np.array([factor], np.float32))])[0]

    def softcap(self, graph: GraphBuilder, x: str, cap: float) -> str:
        bounded = graph.node("Tanh", [self.scale(graph, x, 1 / cap)])[0]
        return self.scale(graph, bounded, cap)

    def _reshape(self, graph: GraphBuilder, x: str, shape: tuple[int, ...]) -> str:
        return graph.node("Reshape", [x, graph.constant(np.array(shape, np.int64))])[0]
