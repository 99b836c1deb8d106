"""Every form of graph on the HTP: all nodes taken, for both chips, and right."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from engine.errors import GraphRefused
from engine.export.graph import GraphBuilder
from engine.export.qnn_target import QnnTarget
from engine.export.weights_file import StoredMatrix
from engine.npu.graphs import NpuGraphs
from engine.npu.qnn_session import Assignment, QnnOptions, assign, open_graph, run_once
from tests.tiny_graphs import FORMS, Form, write_weights

pytestmark = pytest.mark.npu

X_ELITE, X2_ELITE = 60, 88
BUCKETS = (1, 8, 32, 128)
MAX_RELATIVE_RMS = 2e-3
"""Against the CPU in fp32. The HTP computes in fp16, whose steps are 5e-4 to 1e-3 of a number; seen
are 4e-4 to 1.3e-3."""

Arrays = dict[str, NDArray[np.generic]]


@pytest.fixture(scope="module", params=FORMS, ids=[name.replace(" ", "-") for name in FORMS])
def graphs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    folder.joinpath("form").write_text(request.param)
    return folder


def graphs_in(folder: Path) -> NpuGraphs:
    return NpuGraphs(*write_weights(folder, FORMS[folder.joinpath("form").read_text()]))


@pytest.mark.parametrize("soc_model", [X_ELITE, X2_ELITE])
def test_every_node_of_every_graph_runs_on_the_htp_and_is_right(
    graphs: Path, soc_model: int
) -> None:
    made = graphs_in(graphs)
    options = QnnOptions(soc_model, emulated=True)
    buckets = BUCKETS if graphs.joinpath("form").read_text() == "plain" else (8,)
    for name in made.names:
        for num_tokens in buckets:
            model = made.model(name, num_tokens)
            inputs, expected = run_on_cpu(model, graphs)
            got = run_once(open_graph(model, name, options, graphs), inputs)
            for output, values in expected.items():
                difference = relative_rms(got[output], values)
                assert difference < MAX_RELATIVE_RMS, (name, num_tokens, output)


def run_on_cpu(model: bytes, folder: Path, inputs: Arrays | None = None) -> tuple[Arrays, Arrays]:
    """Inputs, random unless given, and what ONNX Runtime's CPU provider makes of them."""
    options = ort.SessionOptions()
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", f"{folder}{os.sep}"
    )
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(1)
    inputs = inputs or {
        value.name: random.standard_normal(value.shape, np.float32)
        for value in session.get_inputs()
    }
    names = [value.name for value in session.get_outputs()]
    return inputs, dict(zip(names, session.run(names, inputs), strict=True))


def relative_rms(got: NDArray[np.generic], expected: NDArray[np.generic]) -> float:
    difference = got.astype(np.float64) - expected.astype(np.float64)
    return float(np.sqrt((difference**2).mean() / (expected.astype(np.float64) ** 2).mean()))


class BiasInside(QnnTarget):
    """Gives the bias to the matrix product itself, as the HTP does not want it."""

    def matmul(self, graph: GraphBuilder, x: str, weight: StoredMatrix) -> str:
        assert weight.scales is not None and weight.bias is not None
        inputs = [x, *map(graph.stored, (weight.data, weight.scales))]
        return graph.node(
            "MatMulNBits",
            [*inputs, "", "", graph.stored(weight.bias)],
            domain="com.microsoft",
            K=weight.num_cols,
            N=weight.num_rows,
            bits=weight.bits,
            block_size=weight.block_size,
        )[0]


@pytest.fixture
def refused(tmp_path: Path) -> bytes:
    _, weights = write_weights(tmp_path, Form(bias=True))
    graph = GraphBuilder("weights.bin")
    target = BiasInside(num_tokens=4)
    layer = weights.layers[0]
    assert layer.attn_norm is not None
    qkv = target.matmul(graph, target.norm(graph, "x", layer.attn_norm, 1e-5), layer.qkv)
    shape = (1, 4, layer.qkv.num_rows)
    model = graph.model("refused", {"x": (1, 4, layer.qkv.num_cols)}, {"y": (qkv, shape)}, 24)
    for node in model.graph.node:
        node.name = f"the {node.op_type}"
    data: bytes = model.SerializeToString()
    return data


def test_a_graph_with_a_node_for_the_cpu_is_refused_with_the_providers_reason(
    refused: bytes, tmp_path: Path
) -> None:
    with pytest.raises(GraphRefused, match="segment: .*MatMulNBits the MatMulNBits: .*bias"):
        open_graph(refused, "segment", QnnOptions(X2_ELITE, emulated=True), tmp_path)


def test_an_assignment_counts_the_nodes_and_tells_why(refused: bytes, tmp_path: Path) -> None:
    found = assign(refused, "segment", QnnOptions(X2_ELITE, emulated=True), tmp_path)
    reason = "Unsupported inputs g_idx or bias."
    assert found == Assignment(1, 2, (("MatMulNBits the MatMulNBits", reason),))
