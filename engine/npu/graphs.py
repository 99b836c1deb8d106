"""The graphs of a bundle for the NPU: one for every segment and for the head, per token bucket.

They are made from the bundle's index of weights and point into its weights file, so nothing is
copied. Knows neither the provider nor what becomes of the graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx

from engine.architectures.config import ModelConfig
from engine.bundle import WEIGHTS_FILE
from engine.export.graph import SegmentBuilder
from engine.export.model import DecoderWeights, load_weights
from engine.export.qnn_target import QnnTarget

HEAD = "head"


def segment_name(index: int) -> str:
    return f"segment_{index:03d}"


def part_names(num_layers: int) -> tuple[str, ...]:
    """The segments, in order, and the head."""
    return (*map(segment_name, range(num_layers + 1)), HEAD)


@dataclass(frozen=True, slots=True)
class NpuGraphs:
    """All graphs of one bundle but the fused ones, which are in `fused_graphs.py`."""

    config: ModelConfig
    weights: DecoderWeights

    @classmethod
    def of(cls, config: ModelConfig, folder: Path) -> NpuGraphs:
        """Raises BundleError when the bundle's index of weights is damaged."""
        return cls(config, load_weights(folder))

    @property
    def names(self) -> tuple[str, ...]:
        return part_names(len(self.weights.layers))

    def segment(self, index: int, num_tokens: int) -> bytes:
        builder, layers = self._builder(num_tokens), self.weights.layers
        if index == 0:
            model = builder.first(layers[0])
        elif index == len(layers):
            model = builder.last(layers[-1])
        else:
            model = builder.middle(index, layers[index - 1], layers[index])
        return unique_names(model, f"{segment_name(index)}_t{num_tokens}")

    def head(self, num_tokens: int) -> bytes:
        """`num_tokens` is the number of rows that logits are wanted of."""
        model = self._builder(num_tokens).head(self.weights.final_norm, self.weights.lm_head)
        return unique_names(model, f"{HEAD}_t{num_tokens}")

    def model(self, name: str, num_tokens: int) -> bytes:
        """The graph called `name`, one of `names`."""
        if name == HEAD:
            return self.head(num_tokens)
        return self.segment(self.names.index(name), num_tokens)

    def _builder(self, num_tokens: int) -> SegmentBuilder:
        return SegmentBuilder(self.config, QnnTarget(num_tokens), WEIGHTS_FILE)


def unique_names(model: onnx.ModelProto, name: str) -> bytes:
    """Gives the graph, its nodes and its inner values names that occur in no other graph.

    Graphs that share a context must not share the names of values either, apart from weights; a
    node's name is what the provider calls it when it refuses it.
    """
    graph = model.graph
    public = {value.name for value in graph.output}
    inner = {output for node in graph.node for output in node.output} - public
    for number, node in enumerate(graph.node):
        node.name = f"{name}/{node.op_type}_{number}"
        for values in (node.input, node.output):
            for i, value in enumerate(values):
                if value in inner:
                    values[i] = f"{name}/{value}"
    graph.name = name
    data: bytes = model.SerializeToString()
    return data
