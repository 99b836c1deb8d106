"""The segment graphs: their shapes, and what they compute against the textbook formulas."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from engine.bundle import WEIGHTS_FILE, Bundle
from engine.export.model import HEAD_FILE, segment_file
from engine.importers.gguf import read_gguf
from tests.loaded_model import load_model
from tests.numpy_forward import numpy_forward
from tests.tiny_model import import_tiny_model

HIDDEN, ATTENTION, QKV, VOCAB = 64, 3 * 32, 5 * 32, 320
TOKENS = np.random.default_rng(1).integers(0, VOCAB, 100).tolist()


def shapes(values: object) -> dict[str, list[int | str]]:
    return {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in values  # type: ignore[attr-defined]
    }


def load_graph(bundle: Bundle, name: str) -> onnx.ModelProto:
    return onnx.load(bundle.path / name, load_external_data=False)


def test_every_segment_has_one_free_dimension(tiny_bundle: Bundle) -> None:
    hidden, attention = [1, "T", HIDDEN], [1, "T", ATTENTION]
    expected = {
        segment_file(0): ({"hidden": hidden}, {"qkv": [1, "T", QKV]}),
        segment_file(1): (
            {"attention": attention, "hidden": hidden},
            {"hidden_out": hidden, "qkv": [1, "T", QKV]},
        ),
        segment_file(2): ({"attention": attention, "hidden": hidden}, {"hidden_out": hidden}),
        HEAD_FILE: ({"hidden": hidden}, {"logits": [1, "T", VOCAB]}),
    }
    for name, (inputs, outputs) in expected.items():
        graph = load_graph(tiny_bundle, name).graph
        assert (shapes(graph.input), shapes(graph.output)) == (inputs, outputs)
    assert {path.name for path in tiny_bundle.path.glob("*.onnx")} == set(expected)


def graphs(bundle: Bundle) -> Iterator[onnx.ModelProto]:
    for path in sorted(bundle.path.glob("*.onnx")):
        yield load_graph(bundle, path.name)


def test_all_weights_lie_in_the_one_file(tiny_bundle: Bundle) -> None:
    num_bytes = 0
    for model in graphs(tiny_bundle):
        for tensor in model.graph.initializer:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            assert entries["location"] == WEIGHTS_FILE
            num_bytes += int(entries["length"])
    assert 0.5 * num_bytes < tiny_bundle.weights_path.stat().st_size


def test_a_tied_head_reads_the_embeddings_bytes(tiny_bundle: Bundle) -> None:
    names = {tensor.name for tensor in load_graph(tiny_bundle, HEAD_FILE).graph.initializer}
    assert {"embed.data", "embed.scales", "final_norm"} == names


def exact_copy(bundle: Bundle, folder: Path) -> Bundle:
    """The same bundle with activations that stay floats, so that only rounding is left."""
    copy = Bundle(Path(shutil.copytree(bundle.path, folder)), bundle.manifest)
    for path in copy.path.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "accuracy_level":
                    attribute.i = 1
        path.write_bytes(model.SerializeToString())
    return copy


def both(bundle: Bundle) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(the engine's logits with f32 pages, the oracle's)"""
    oracle = numpy_forward(read_gguf(Path(bundle.source.path)), TOKENS)
    return load_model(bundle, "f32").logits_of(TOKENS, range(7)), oracle


def relative_rms(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "tied"), [(1, 1, True), (2, 3, False), (3, 1, False)]
)
def test_without_int8_activations_the_model_equals_the_formulas(
    kernels: None, tmp_path: Path, quant: str, num_layers: int, num_kv_heads: int, tied: bool
) -> None:
    bundle = import_tiny_model(
        tmp_path, quant=quant, num_layers=num_layers, num_kv_heads=num_kv_heads,
        tied_embeddings=tied,
    )  # fmt: skip
    found, oracle = both(exact_copy(bundle, tmp_path / "exact"))
    difference = float(np.abs(found - oracle).max())
    assert difference < 1e-5, f"the largest difference is {difference:.3g}"


@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0", "Q4_1", "Q5_1", "F32"])
def test_with_int8_activations_the_model_is_within_their_noise(
    kernels: None, tmp_path: Path, quant: str
) -> None:
    """Rounding 32 values to 127 levels of their largest is noise of about 1 % of a matrix product
    (0.29 steps of 1 / 127 of a maximum that is 2.5 standard deviations, and as much again from
    weights that are not exact). Nine products in a row, whose noise adds up in squares, make 3 %.
    """
    found, oracle = both(import_tiny_model(tmp_path, quant=quant))
    error = relative_rms(found, oracle)
    assert error < 0.05, f"the relative error is {error:.3f}"
    ordered = np.sort(oracle, axis=-1)
    clear = ordered[:, -1] - ordered[:, -2] > 6 * error * oracle.std()
    assert clear.sum() > 50
    assert np.array_equal(found.argmax(axis=-1)[clear], oracle.argmax(axis=-1)[clear])
