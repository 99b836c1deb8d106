"""What a model gets when nobody names a KV format, and that the choice is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.bundle import Bundle
from engine.evaluate.scoring import ScoredBundle, compare
from engine.kv_guard import (
    KV_NOISE_FILE,
    MAX_NOISE,
    KVChoice,
    choose_kv_format,
    read_kv_noise,
)
from engine.loader import EngineConfig, load_engine
from tests.memory_checkpoint import random_checkpoint, tiny_config, write_checkpoint

QUIET = {"f32": 0.0, "int8": MAX_NOISE / 8, "int8k4v": MAX_NOISE / 8, "int4": 2 * MAX_NOISE}
NOISY = {"f32": 0.0, "int8": 3 * MAX_NOISE, "int8k4v": 3 * MAX_NOISE, "int4": 50 * MAX_NOISE}


def test_int8_is_what_models_get() -> None:
    choice = choose_kv_format("auto", QUIET)
    assert (choice.kv_format, choice.is_risky) == ("int8", False)
    assert "0.031 nats" in choice.reason


def test_keys_that_int8_would_damage_stay_as_they_are() -> None:
    choice = choose_kv_format("auto", NOISY)
    assert (choice.kv_format, choice.is_risky) == ("f32", False)
    assert "0.75 nats" in choice.reason and "more than 0.25" in choice.reason


@pytest.mark.parametrize(
    ("asked", "noise", "is_risky"),
    [
        ("int8", NOISY, True),
        ("int4", QUIET, True),
        ("int8k4v", QUIET, False),
        ("f32", NOISY, False),
    ],
)
def test_what_is_asked_for_is_done_and_said(
    asked: str, noise: dict[str, float], is_risky: bool
) -> None:
    choice = choose_kv_format(asked, noise)
    assert (choice.kv_format, choice.is_risky) == (asked, is_risky)


def test_a_bundle_that_does_not_say_gets_the_default(tmp_path: Path) -> None:
    assert read_kv_noise(tmp_path) == {}
    unknown = "this bundle does not say what its keys bear"
    assert choose_kv_format("auto", {}) == KVChoice("int8", unknown, False)
    assert choose_kv_format("int4", {}) == KVChoice("int4", unknown, False)


@pytest.mark.parametrize("text", ["", "[1]", '{"int8": "much"}', "\x00"])
def test_a_damaged_file_says_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / KV_NOISE_FILE).write_text(text)
    assert read_kv_noise(tmp_path) == {}


@pytest.fixture(scope="module")
def bundles(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Bundle]:
    """A model, and the same one with key biases as Qwen2 has them."""
    folder = tmp_path_factory.mktemp("guard")
    checkpoint = random_checkpoint(tiny_config(qkv_bias=True))
    plain = write_checkpoint(checkpoint, folder / "plain")
    for layer in range(2):
        checkpoint.tensors[f"layers.{layer}.k_bias"][[3, 32 + 20]] = 250
    return plain, write_checkpoint(checkpoint, folder / "biased")


def load(bundle: Bundle, kv_format: str) -> str:
    engine = EngineConfig(bundle.path, "cpu", 1, 1 << 30, kv_format, 64, 1, 64)
    return load_engine(engine, lambda phase: None).info.kv_format


def test_the_engine_takes_the_guarded_format(bundles: tuple[Bundle, Bundle]) -> None:
    plain, biased = bundles
    assert (load(plain, "auto"), load(biased, "auto"), load(biased, "int8")) == (
        "int8",
        "f32",
        "int8",
    )


def test_the_guard_tells_models_apart_as_their_predictions_do(
    bundles: tuple[Bundle, Bundle],
) -> None:
    texts = np.random.default_rng(3).integers(0, 272, (2, 48)).astype(np.int32)
    divergences = []
    for bundle in bundles:
        exact, quantized = (ScoredBundle(name, bundle, name) for name in ("f32", "int8"))
        _, found = compare(exact, [quantized], texts, 1, lambda label, done, total: None)
        assert found.divergence is not None
        divergences.append(found.divergence.mean_kl)
    plain, biased = divergences
    assert biased > 30 * plain
