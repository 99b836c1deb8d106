"""The fused graphs of a bundle: which runs of layers they have, and how each is made.

A part is called `fused_004_008` for the layers 4 to 7. Knows neither the provider nor what becomes
of the graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.bundle import WEIGHTS_FILE
from engine.export.fused_graph import FusedBuilder
from engine.export.qnn_target import QnnTarget
from engine.npu.device_config import FusedForm
from engine.npu.graphs import NpuGraphs, unique_names
from engine.npu.recipe import ContextGroup, GraphId

_PREFIX = "fused"


@dataclass(frozen=True, slots=True)
class FusedPart:
    """The layers `first` to `end` - 1."""

    first: int
    end: int

    @property
    def name(self) -> str:
        return f"{_PREFIX}_{self.first:03d}_{self.end:03d}"

    @property
    def layers(self) -> range:
        return range(self.first, self.end)


def fused_parts(num_layers: int, layers_per_graph: int) -> tuple[FusedPart, ...]:
    """Runs of `layers_per_graph` layers; the last may be shorter."""
    return tuple(
        FusedPart(first, min(first + layers_per_graph, num_layers))
        for first in range(0, num_layers, layers_per_graph)
    )


def is_fused(part: str) -> bool:
    return part.startswith(_PREFIX)


def fused_model(graphs: NpuGraphs, graph: GraphId) -> bytes:
    """The graph of a part that `fused_parts` named."""
    first, end = map(int, graph.part.split("_")[1:])
    builder = FusedBuilder(graphs.config, QnnTarget(graph.num_tokens), WEIGHTS_FILE, graph.window)
    return unique_names(builder.layers(first, graphs.weights.layers[first:end]), graph.name)


def fused_groups(num_layers: int, form: FusedForm) -> tuple[ContextGroup, ...]:
    """One group for each part: a graph for every pair of a token and a window bucket."""
    if not form.layers_per_graph:
        return ()
    return tuple(
        ContextGroup(
            part.name,
            tuple(
                GraphId(part.name, num_tokens, window)
                for num_tokens in form.token_buckets
                for window in form.window_buckets
            ),
        )
        for part in fused_parts(num_layers, form.layers_per_graph)
    )
