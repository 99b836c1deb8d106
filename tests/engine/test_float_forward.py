"""The float32 forward: the plain numpy oracle's logits, and what its matrices really read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.architectures.config import LayerConfig
from engine.float_forward import FloatForward
from engine.quantize.calibration import LayerInputs, calibrate
from tests.loaded_model import load_model
from tests.memory_checkpoint import (
    MemoryCheckpoint,
    random_checkpoint,
    tiny_config,
    write_checkpoint,
)
from tests.numpy_forward import numpy_forward, rms_norm

TEXTS = np.random.default_rng(1).integers(0, 272, (2, 40)).astype(np.int32)
pytestmark = pytest.mark.usefixtures("kernels")

CONFIGS = {
    "plain": tiny_config(),
    "biased": tiny_config(qkv_bias=True, mlp_bias=True, output_bias=True),
    "tied": tiny_config(tied_embeddings=True),
    "sandwich": tiny_config(
        norm_placement="sandwich",
        query_key_norm="head",
        embedding_scale=3.0,
        activation="gelu_tanh",
    ),
    "post": tiny_config(norm_placement="post", query_key_norm="full"),
    "windowed": replace(tiny_config(), layers=(LayerConfig(window=4), LayerConfig())),
    "scaled": tiny_config(residual_scale=0.5, logits_scale=0.25, logits_softcap=5.0),
}


def logits_of(checkpoint: MemoryCheckpoint, texts: np.ndarray, max_rows: int = 16) -> np.ndarray:
    forward = FloatForward(checkpoint, texts, num_threads=1)
    before = forward.first()
    hidden = before.hidden
    for layer in range(checkpoint.config.num_layers):
        attention = forward.attention(layer, before.qkv)
        result = forward.rest(layer, before.hidden, attention)
        hidden, before = result.hidden, result.following or before
    return np.concatenate(list(forward.logits(hidden, max_rows)))


def test_logits_are_those_of_the_oracle() -> None:
    checkpoint = random_checkpoint(CONFIGS["plain"])
    expected = np.concatenate([numpy_forward(checkpoint, text.tolist()) for text in TEXTS])
    np.testing.assert_allclose(logits_of(checkpoint, TEXTS), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_engine_with_float32_weights(name: str, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(CONFIGS[name])
    model = load_model(write_checkpoint(checkpoint, tmp_path / "model"), "f32")
    expected = np.concatenate([model.logits_of(text.tolist(), [0, 1, 2]) for text in TEXTS])
    np.testing.assert_allclose(logits_of(checkpoint, TEXTS), expected, rtol=1e-4, atol=2e-4)


def test_chunks_of_logits_never_cross_a_text() -> None:
    checkpoint = random_checkpoint(tiny_config(num_layers=1))
    forward = FloatForward(checkpoint, TEXTS, num_threads=1)
    chunks = forward.logits(forward.first().hidden, max_rows=32)
    assert [len(chunk) for chunk in chunks] == [32, 8, 32, 8]


def layers_of(checkpoint: MemoryCheckpoint) -> list[LayerInputs]:
    return list(calibrate(checkpoint, TEXTS, num_threads=1))


def test_captured_inputs_are_what_the_matrices_read() -> None:
    """Where it can be told from outside: the normed embedding, and shapes everywhere."""
    checkpoint = random_checkpoint(tiny_config())
    first, second = layers_of(checkpoint)
    embedded = checkpoint.tensors["embed"][TEXTS.reshape(-1)]
    normed = rms_norm(embedded, checkpoint.tensors["layers.0.attn_norm"], 1e-5)
    np.testing.assert_allclose(first.inputs["qkv"], normed, atol=1e-5)
    assert first.following is not None and second.following is None
    expected = rms_norm(first.following.hidden, checkpoint.tensors["layers.1.attn_norm"], 1e-5)
    np.testing.assert_allclose(second.inputs["qkv"], expected, atol=1e-5)
    sizes = {stack: values.shape for stack, values in second.inputs.items()}
    assert sizes == {"qkv": (80, 128), "o": (80, 192), "gate_up": (80, 128), "down": (80, 192)}


def test_the_mlp_reads_what_the_residual_and_its_norm_make() -> None:
    checkpoint = random_checkpoint(tiny_config(num_layers=1))
    (layer,) = layers_of(checkpoint)
    embedded = checkpoint.tensors["embed"][TEXTS.reshape(-1)]
    hidden = embedded + layer.inputs["o"] @ checkpoint.tensors["layers.0.o"].T
    normed = rms_norm(hidden, checkpoint.tensors["layers.0.mlp_norm"], 1e-5)
    np.testing.assert_allclose(layer.inputs["gate_up"], normed, atol=1e-4)
    gate = normed @ checkpoint.tensors["layers.0.gate"].T
    up = normed @ checkpoint.tensors["layers.0.up"].T
    np.testing.assert_allclose(layer.inputs["down"], gate / (1 + np.exp(-gate)) * up, atol=1e-4)


def test_without_norms_in_front_the_matrices_read_the_residual() -> None:
    checkpoint = random_checkpoint(tiny_config(norm_placement="post"))
    first, _ = layers_of(checkpoint)
    embedded = checkpoint.tensors["embed"][TEXTS.reshape(-1)]
    np.testing.assert_array_equal(first.inputs["qkv"], embedded)


def test_texts_do_not_see_each_other() -> None:
    checkpoint = random_checkpoint(tiny_config())
    both = logits_of(checkpoint, TEXTS)
    alone = logits_of(checkpoint, TEXTS[1:])
    np.testing.assert_allclose(both[40:], alone, atol=1e-5)


def test_calibration_goes_on_from_any_layer_with_the_same_bits() -> None:
    checkpoint = random_checkpoint(tiny_config(num_layers=3))
    whole = layers_of(checkpoint)
    resumed = list(calibrate(checkpoint, TEXTS, 1, start=1, activations=whole[0].following))
    assert [layer.layer for layer in resumed] == [1, 2]
    for mine, theirs in zip(resumed, whole[1:], strict=True):
        for stack, values in mine.inputs.items():
            np.testing.assert_array_equal(values, theirs.inputs[stack])


def test_only_one_layer_is_read_at_a_time() -> None:
    checkpoint = random_checkpoint(tiny_config(num_layers=4))
    seen: list[int] = []
    for layer in calibrate(checkpoint, TEXTS, num_threads=1):
        names = [name for name in checkpoint.reads if name.startswith("layers.")]
        seen = sorted({int(name.split(".")[1]) for name in names})
        assert seen in ([layer.layer, layer.layer + 1], [layer.layer])
        checkpoint.reads.clear()
    assert seen == [3]
