"""A whole checkpoint: what is written, what an interruption costs, and that nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.bundle import Bundle
from engine.errors import ImportFailed
from engine.evaluate.scoring import Figures, ScoredBundle, ScoredCheckpoint, compare
from engine.export.exporter import write_bundle
from engine.export.model import load_weights
from engine.manifest import BundleSource
from engine.quantize.model import REPORT_FILE, QuantizeReport, QuantizingWriter
from engine.quantize.settings import QuantizeSettings
from tests.memory_checkpoint import MemoryCheckpoint, random_checkpoint, tiny_config

TEXTS = np.random.default_rng(5).integers(0, 272, (3, 48)).astype(np.int32)
OnProgress = Callable[[int, int], None]
pytestmark = pytest.mark.usefixtures("kernels")


def no_progress(done: int, total: int) -> None:
    pass


def quantize(
    checkpoint: MemoryCheckpoint,
    folder: Path,
    settings: QuantizeSettings,
    on_progress: OnProgress = no_progress,
) -> tuple[Bundle, QuantizeReport]:
    writer = QuantizingWriter(settings, TEXTS, folder.with_name(f".parts-{folder.name}"), 1)
    source = BundleSource("memory", 0, 0, checkpoint.digest)
    bundle = write_bundle(checkpoint, source, folder, folder.name, on_progress, writer)
    return bundle, writer.finish()


def figures_of(checkpoint: MemoryCheckpoint, *bundles: Bundle) -> tuple[Figures, ...]:
    reference = ScoredCheckpoint("f32", checkpoint, 0)
    candidates = [ScoredBundle(bundle.name, bundle, "f32") for bundle in bundles]
    texts = np.random.default_rng(6).integers(0, 272, (2, 48)).astype(np.int32)
    return compare(reference, candidates, texts, 1, lambda label, done, total: None)[1:]


def mean_kl(figures: Figures) -> float:
    assert figures.divergence is not None
    return figures.divergence.mean_kl


def contents(bundle: Bundle) -> dict[str, bytes]:
    names = [file.name for file in bundle.manifest.files]
    return {name: (bundle.path / name).read_bytes() for name in names}


CONFIGS = {
    "plain": tiny_config(),
    "biased": tiny_config(qkv_bias=True, mlp_bias=True),
    "tied": tiny_config(tied_embeddings=True),
    "sandwich": tiny_config(norm_placement="sandwich", query_key_norm="head"),
    "post": tiny_config(norm_placement="post", query_key_norm="full"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_scale_that_was_moved_is_taken_up_elsewhere(name: str, tmp_path: Path) -> None:
    """At 8 bits everywhere, scaled weights and plain ones give the same model but for rounding."""
    checkpoint = random_checkpoint(CONFIGS[name])
    plain, _ = quantize(checkpoint, tmp_path / "plain", QuantizeSettings("int8"))
    scaled, report = quantize(
        checkpoint, tmp_path / "scaled", QuantizeSettings("mixed", max_bits=9.0)
    )
    assert {one.bits for layer in report.layers for one in layer} == {8}
    assert any(one.alpha > 0 for layer in report.layers for one in layer)
    of_plain, of_scaled = (mean_kl(one) for one in figures_of(checkpoint, plain, scaled))
    assert of_scaled < 2 * of_plain + 1e-6


def test_activation_aware_weights_are_nearer_to_the_truth_at_the_same_size(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tiny_config(num_layers=3))
    plain, plain_report = quantize(checkpoint, tmp_path / "plain", QuantizeSettings("int4"))
    aware, aware_report = quantize(checkpoint, tmp_path / "aware", QuantizeSettings("int4-awq"))
    assert aware.weights_path.stat().st_size == plain.weights_path.stat().st_size
    assert aware_report.bits_per_weight == plain_report.bits_per_weight == 5.125
    of_plain, of_aware = (mean_kl(one) for one in figures_of(checkpoint, plain, aware))
    assert of_aware < 0.8 * of_plain


def test_a_mixed_model_keeps_its_budget_and_lies_between(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tiny_config(num_layers=3))
    narrow, _ = quantize(checkpoint, tmp_path / "narrow", QuantizeSettings("int4-awq"))
    mixed, report = quantize(
        checkpoint, tmp_path / "mixed", QuantizeSettings("mixed", max_bits=6.5)
    )
    assert 5.5 < report.bits_per_weight <= 6.5
    assert {one.bits for layer in report.layers for one in layer} == {4, 8}
    assert mixed.weight_format == "int4/int8"
    of_narrow, of_mixed = (mean_kl(one) for one in figures_of(checkpoint, narrow, mixed))
    assert of_mixed < of_narrow


CHECKPOINT = random_checkpoint(tiny_config(num_layers=3, qkv_bias=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[QuantizeSettings], Bundle]:
    """The bundle of an undisturbed quantization, made once for each settings."""
    folder = tmp_path_factory.mktemp("whole")

    def make(settings: QuantizeSettings) -> Bundle:
        path = folder / settings.weight_format / "model"
        path.parent.mkdir(exist_ok=True)
        return Bundle.open(path) if path.exists() else quantize(CHECKPOINT, path, settings)[0]

    return make


def interrupted_at(layer: int) -> OnProgress:
    def interrupt(done: int, total: int) -> None:
        if done == layer:
            raise KeyboardInterrupt

    return interrupt


@pytest.mark.parametrize(
    ("weight_format", "layer"),
    [("int4", 0), ("int4", 2), ("int4-awq", 1), ("int4-awq", 3), ("mixed", 2), ("mixed", 5)],
)
def test_an_interrupted_quantization_goes_on_to_the_same_bytes(
    weight_format: str,
    layer: int,
    whole: Callable[[QuantizeSettings], Bundle],
    tmp_path: Path,
) -> None:
    """Before the first layer, between layers, behind the last, and while writing the bundle."""
    settings = QuantizeSettings(weight_format)
    with pytest.raises(KeyboardInterrupt):
        quantize(CHECKPOINT, tmp_path / "model", settings, interrupted_at(layer))
    assert not (tmp_path / "model").exists()
    seen: list[int] = []
    resumed, _ = quantize(
        CHECKPOINT, tmp_path / "model", settings, lambda done, total: seen.append(done)
    )
    assert seen[0] == min(layer, 3)
    assert contents(resumed) == contents(whole(settings))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["model"]


@pytest.mark.parametrize("damaged", ["activations.npz", "layer_001.npz", "key.json"])
def test_what_is_lost_is_done_again(
    damaged: str, whole: Callable[[QuantizeSettings], Bundle], tmp_path: Path
) -> None:
    settings = QuantizeSettings("int4")
    with pytest.raises(KeyboardInterrupt):
        quantize(CHECKPOINT, tmp_path / "model", settings, interrupted_at(2))
    (tmp_path / ".parts-model" / damaged).unlink()
    resumed, _ = quantize(CHECKPOINT, tmp_path / "model", settings)
    assert contents(resumed) == contents(whole(settings))


def test_parts_of_other_settings_are_not_used(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tiny_config())
    with pytest.raises(KeyboardInterrupt):
        quantize(checkpoint, tmp_path / "model", QuantizeSettings("int8"), interrupted_at(2))
    model, report = quantize(checkpoint, tmp_path / "model", QuantizeSettings("int4"))
    assert model.weight_format == "int4"
    assert {one.bits for layer in report.layers for one in layer} == {4}


def test_the_report_is_in_the_bundle(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tiny_config())
    bundle, report = quantize(checkpoint, tmp_path / "model", QuantizeSettings("int4-awq"))
    document = json.loads((bundle.path / REPORT_FILE).read_text("utf-8"))
    assert document["settings"]["weight_format"] == "int4-awq"
    assert document["num_tokens"] == report.num_tokens == TEXTS.size
    stacks = [[one["stack"] for one in layer] for layer in document["layers"]]
    assert stacks == [["qkv", "o", "gate_up", "down"]] * 2
    for layer in report.layers:
        for one in layer:
            assert 0 < one.output_error < 0.05
            assert 0 < one.weight_error < 0.2


@pytest.mark.parametrize(("head_bits", "expected"), [(8, 8), (4, 4)])
def test_the_embedding_and_the_head_have_bits_of_their_own(
    head_bits: int, expected: int, tmp_path: Path
) -> None:
    checkpoint = random_checkpoint(tiny_config())
    settings = QuantizeSettings("int4", head_bits=head_bits)
    bundle, _ = quantize(checkpoint, tmp_path / "model", settings)
    weights = load_weights(bundle.path)
    assert weights.embed.bits == weights.lm_head.bits == expected
    assert {layer.qkv.bits for layer in weights.layers} == {4}


@pytest.mark.parametrize("block_size", [64, 128])
def test_wider_blocks_lose_more(block_size: int, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(replace(tiny_config(num_layers=1), intermediate_size=256))
    _, narrow = quantize(checkpoint, tmp_path / "narrow", QuantizeSettings("int4"))
    _, wide = quantize(checkpoint, tmp_path / "wide", QuantizeSettings("int4", block_size))
    assert wide.bits_per_weight < narrow.bits_per_weight
    for one, other in zip(narrow.layers[0], wide.layers[0], strict=True):
        assert other.block_size == block_size
        assert other.weight_error > one.weight_error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (QuantizeSettings("int5"), "unknown format 'int5'"),
        (QuantizeSettings("int4", block_size=48), "a block of 48 weights: use one of 32, 64, 128"),
        (QuantizeSettings("mixed", max_bits=5.0), "take 5.12 with their scales"),
        (QuantizeSettings("int4", head_bits=6), "a head of 6 bits"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: QuantizeSettings, message: str) -> None:
    with pytest.raises(ImportFailed, match=message):
        settings.check()


def test_what_another_process_made_meanwhile_has_no_report_of_ours(tmp_path: Path) -> None:
    writer = QuantizingWriter(QuantizeSettings("int4"), TEXTS, tmp_path / "parts", 1)
    with pytest.raises(ImportFailed, match="another process has just made this model"):
        writer.finish()


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tiny_config())
    checkpoint.tensors["layers.1.up"][3, 5] = np.nan
    with pytest.raises(ImportFailed, match="layers.1.up"):
        quantize(checkpoint, tmp_path / "model", QuantizeSettings("int4"))
    assert not (tmp_path / "model").exists()
