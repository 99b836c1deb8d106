"""Random models of true shapes: the shapes, the size, and that they run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.architectures.table import tensor_shapes
from engine.bundle import Bundle
from engine.errors import ImportFailed
from engine.export.exporter import decoder_writer, write_bundle
from engine.export.model import load_weights
from engine.export.packing import unpack
from engine.manifest import BundleSource
from engine.synthetic.checkpoint import SyntheticCheckpoint
from engine.synthetic.shapes import SHAPES
from engine.synthetic.tokenizer import END_OF_TEXT, synthetic_tokenizer
from tests.loaded_model import load_model
from tests.memory_checkpoint import tiny_config


@pytest.mark.parametrize(
    ("name", "billions"),
    [("phi-3-mini", 3.82), ("qwen2-7b", 7.62), ("llama-3-8b", 8.03), ("qwen2-13b-class", 14.77)],
)
def test_shapes_have_the_parameters_of_the_real_models(name: str, billions: float) -> None:
    shape = SHAPES[name]
    summary = SyntheticCheckpoint(shape.config(), shape.title, 4).summary
    assert summary.num_parameters / 1e9 == pytest.approx(billions, abs=0.005)


def small(bits: int, seed: int = 0) -> SyntheticCheckpoint:
    shape = replace(
        SHAPES["qwen2-7b"],
        hidden_size=256,
        intermediate_size=384,
        num_heads=4,
        num_kv_heads=2,
        head_size=64,
        vocab_size=700,
    )
    return SyntheticCheckpoint(shape.config(num_layers=2), "a small one", bits, seed)


def write(checkpoint: SyntheticCheckpoint, folder: Path) -> Bundle:
    source = BundleSource("synthetic", 0, 0, checkpoint.digest)
    writer = decoder_writer("auto", checkpoint.pack)
    return write_bundle(checkpoint, source, folder, folder.name, lambda done, total: None, writer)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_synthetic_model_predicts_something_finite(
    kernels: None, bits: int, tmp_path: Path
) -> None:
    bundle = write(small(bits), tmp_path / "model")
    assert bundle.weight_format == f"int{bits}"
    weights = load_weights(bundle.path)
    assert {layer.down.bits for layer in weights.layers} == {bits}
    assert weights.embed.bits == weights.lm_head.bits == 8
    logits = load_model(bundle).logits_of(list(range(40)), [0, 1, 2])
    assert logits.shape == (40, 700)
    assert np.isfinite(logits).all()
    assert 0.2 < logits.std() < 5


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two = write(small(4), tmp_path / "one"), write(small(4), tmp_path / "two")
    assert one.weights_path.read_bytes() == two.weights_path.read_bytes()
    other = write(small(4, seed=1), tmp_path / "other")
    assert one.weights_path.read_bytes() != other.weights_path.read_bytes()
    assert one.source.sha256 != other.source.sha256


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_have_the_size_that_keeps_activations_at_one(bits: int) -> None:
    checkpoint = small(bits)
    tensors = [checkpoint.tensor(f"layers.0.{part}") for part in ("gate", "up")]
    weights = unpack(checkpoint.pack("layers.0.gate_up", tensors))
    assert weights.shape == (768, 256)
    assert weights.std() * np.sqrt(256) == pytest.approx(1.04, abs=0.06)


def test_tensors_are_the_same_however_they_are_read() -> None:
    tensor = SyntheticCheckpoint(tiny_config(vocab_size=2500), "x", 4).tensor("embed")
    whole = tensor.dequantize()
    assert whole.shape == tensor.shape == (2500, 128)
    np.testing.assert_array_equal(tensor.rows(1000, 2100), whole[1000:2100])
    np.testing.assert_array_equal(tensor.raw().view(np.float32), whole)


def test_every_tensor_of_the_architecture_is_there_and_no_other() -> None:
    checkpoint = small(4)
    for name, shape in tensor_shapes(checkpoint.config).items():
        assert name in checkpoint
        assert checkpoint.tensor(name).shape == shape
    assert "layers.0.q_norm" not in checkpoint
    with pytest.raises(ImportFailed, match="no tensor 'layers.2.q'"):
        checkpoint.tensor("layers.2.q")


@pytest.mark.parametrize("vocab_size", [257, 700, 32_064])
def test_the_tokenizer_has_every_id_and_keeps_any_text(vocab_size: int) -> None:
    tokenizer = Tokenizer.from_str(synthetic_tokenizer(vocab_size))
    assert tokenizer.get_vocab_size() == vocab_size
    assert tokenizer.token_to_id(END_OF_TEXT) == vocab_size - 1
    text = "Grüße, 世界 🙂\n\tx  y"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_words_of_the_tokenizer_differ() -> None:
    tokenizer = Tokenizer.from_str(synthetic_tokenizer(5000))
    words = [tokenizer.decode([index]) for index in range(256, 4999)]
    assert len(set(words)) == len(words)
    assert all(word.startswith(" ") and word[1:].isalpha() for word in words)
