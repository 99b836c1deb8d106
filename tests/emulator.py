"""The NPU's graphs of a bundle, opened in the HTP emulator or, as a reference, on the CPU provider.

The reference runs the very same graphs with fp32 activations (accuracy level 0), so what differs
is the arithmetic of the HTP and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from engine.batch import Float32Array
from engine.bundle import Bundle
from engine.npu.device_config import FusedForm, load_device
from engine.npu.fused_graphs import fused_groups, fused_model, fused_parts
from engine.npu.fused_lane import FusedGraphs
from engine.npu.graphs import HEAD, NpuGraphs
from engine.npu.lane import LaneGraphs
from engine.npu.qnn_session import QnnOptions, open_graph
from engine.session import Session

Open = Callable[[bytes, str], Session]


def emulated_options(soc_model: int) -> QnnOptions:
    return QnnOptions(soc_model, True, load_device("emulated").provider_options)


def emulated_graphs(
    bundle: Bundle, soc_model: int, buckets: Sequence[int], head_buckets: Sequence[int]
) -> LaneGraphs:
    """Compiled for a chip and opened in the emulator; the CPU provider may take no node."""

    def opened(model: bytes, name: str) -> Session:
        return open_graph(model, name, emulated_options(soc_model), bundle.path)

    return _lane_graphs(bundle, buckets, head_buckets, opened)


def reference_graphs(
    bundle: Bundle, buckets: Sequence[int], head_buckets: Sequence[int]
) -> LaneGraphs:
    """The same graphs on the CPU provider."""

    def opened(model: bytes, name: str) -> Session:
        return open_reference(model, name, bundle.path)

    return _lane_graphs(bundle, buckets, head_buckets, opened)


def open_reference(model: bytes, name: str, weights_folder: Path) -> Session:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", f"{weights_folder}/"
    )
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return Session(name, session)


def _lane_graphs(
    bundle: Bundle, buckets: Sequence[int], head_buckets: Sequence[int], opened: Open
) -> LaneGraphs:
    graphs = NpuGraphs.of(bundle.config, bundle.path)
    *segments, head = graphs.names
    return LaneGraphs(
        {
            b: [opened(graphs.model(name, b), f"{name} of {b}") for name in segments]
            for b in buckets
        },
        {b: opened(graphs.model(head, b), f"{head} of {b}") for b in head_buckets},
    )


def relative_rms(found: Float32Array, expected: Float32Array) -> float:
    """The root of the mean square of the difference, relative to that of `expected`."""
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


def emulated_fused_graphs(
    bundle: Bundle,
    soc_model: int,
    layers_per_graph: int,
    token_buckets: Sequence[int],
    window_buckets: Sequence[int],
    head_buckets: Sequence[int],
) -> FusedGraphs:
    def opened(model: bytes, name: str) -> Session:
        return open_graph(model, name, emulated_options(soc_model), bundle.path)

    form = FusedForm(layers_per_graph, tuple(token_buckets), tuple(window_buckets))
    return _fused_graphs(bundle, form, head_buckets, opened)


def reference_fused_graphs(
    bundle: Bundle,
    layers_per_graph: int,
    token_buckets: Sequence[int],
    window_buckets: Sequence[int],
    head_buckets: Sequence[int],
) -> FusedGraphs:
    def opened(model: bytes, name: str) -> Session:
        return open_reference(model, name, bundle.path)

    form = FusedForm(layers_per_graph, tuple(token_buckets), tuple(window_buckets))
    return _fused_graphs(bundle, form, head_buckets, opened)


def _fused_graphs(
    bundle: Bundle, form: FusedForm, head_buckets: Sequence[int], opened: Open
) -> FusedGraphs:
    graphs = NpuGraphs.of(bundle.config, bundle.path)
    num_layers = bundle.config.num_layers
    parts = fused_parts(num_layers, form.layers_per_graph)
    groups = fused_groups(num_layers, form)
    sessions = tuple(
        (
            part.layers,
            {
                (graph.num_tokens, graph.window): opened(fused_model(graphs, graph), graph.name)
                for graph in group.graphs
            },
        )
        for part, group in zip(parts, groups, strict=True)
    )
    heads = {b: opened(graphs.model(HEAD, b), f"head of {b}") for b in head_buckets}
    return FusedGraphs(sessions, heads)
