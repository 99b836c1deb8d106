"""A bundle's graphs for the NPU, made from its index of weights alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import onnx
import pytest

from engine.bundle import WEIGHTS_FILE, Bundle
from engine.errors import BundleError
from engine.export.graph import CpuTarget, SegmentBuilder
from engine.export.model import INDEX_FILE, load_weights
from engine.npu.graphs import NpuGraphs
from tests.engine.test_qnn_target import relative_rms, run_on_cpu
from tests.tiny_graphs import FORMS, write_weights


@pytest.mark.parametrize("form", FORMS)
def test_the_index_of_weights_is_read_as_it_was_written(tmp_path: Path, form: str) -> None:
    _, weights = write_weights(tmp_path, FORMS[form])
    (tmp_path / INDEX_FILE).write_text(json.dumps(asdict(weights)))
    assert load_weights(tmp_path) == weights


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers": 3}', '{"layers": [{"qkv": 1}]}'])
def test_an_index_that_is_not_one_of_ours_is_a_damaged_bundle(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(BundleError, match=r"its weights\.json is damaged .*hexlm pull"):
        load_weights(tmp_path)


def test_an_imported_model_has_a_graph_for_each_segment_and_its_head(tiny_bundle: Bundle) -> None:
    graphs = NpuGraphs.of(tiny_bundle.config, tiny_bundle.path)
    num_layers = tiny_bundle.config.num_layers
    assert graphs.names == (*(f"segment_{i:03d}" for i in range(num_layers + 1)), "head")


def test_all_shapes_are_fixed_and_no_value_has_a_name_twice(tiny_bundle: Bundle) -> None:
    graphs = NpuGraphs.of(tiny_bundle.config, tiny_bundle.path)
    seen: set[str] = set()
    for name in graphs.names:
        for num_tokens in (1, 8):
            graph = onnx.load_from_string(graphs.model(name, num_tokens)).graph
            public = {value.name for value in (*graph.input, *graph.output)}
            inner = {output for node in graph.node for output in node.output} - public
            assert not inner & seen and graph.name == f"{name}_t{num_tokens}"
            seen |= inner
            for value in (*graph.input, *graph.output):
                dims = value.type.tensor_type.shape.dim
                assert [dim.dim_value for dim in dims][:2] == [1, num_tokens]


MAX_ROUNDING = 2e-2
"""Relative RMS: the CPU's graphs round activations to int8, the others do not. Another activation
function, a norm or a bias left out are off by 0.1 and more."""


@pytest.mark.parametrize("form", FORMS)
def test_graphs_for_the_npu_compute_what_those_for_the_cpu_do(tmp_path: Path, form: str) -> None:
    config, weights = write_weights(tmp_path, FORMS[form])
    builder = SegmentBuilder(config, CpuTarget(), WEIGHTS_FILE)
    first, second = weights.layers
    for_cpu = (
        builder.first(first),
        builder.middle(1, first, second),
        builder.last(second),
        builder.head(weights.final_norm, weights.lm_head),
    )
    graphs = NpuGraphs(config, weights)
    for name, other in zip(graphs.names, for_cpu, strict=True):
        inputs, got = run_on_cpu(graphs.model(name, 8), tmp_path)
        _, expected = run_on_cpu(other.SerializeToString(), tmp_path, inputs)
        for output, values in expected.items():
            assert relative_rms(got[output], values) < MAX_ROUNDING, (name, output)


def test_weights_stay_in_the_bundles_own_file(tiny_bundle: Bundle) -> None:
    model = onnx.load_from_string(NpuGraphs.of(tiny_bundle.config, tiny_bundle.path).head(8))
    places = {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert places == {"weights.bin"}
    assert all(len(tensor.raw_data) < 64 for tensor in model.graph.initializer)
