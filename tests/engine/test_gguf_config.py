"""A GGUF's metadata to numbers: what the file says, what llama.cpp knows, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.architectures.config import LayerConfig, ModelConfig
from engine.architectures.gguf import ARCHITECTURES, GGUF_ARCHITECTURES, read_gguf_config
from engine.architectures.rope import NO_ROPE, linear_rope, plain_rope, yarn_rope
from engine.architectures.table import tensor_shapes
from engine.errors import ImportFailed
from engine.importers.gguf_metadata import Metadata

BASE: dict[str, Any] = {
    "block_count": 6,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
NAMES = frozenset(f"blk.{i}.x" for i in range(99))


def read(architecture: str, names: frozenset[str] = NAMES, **changes: Any) -> ModelConfig:
    """Keyword arguments are keys with `__` for the dots; arrays are the small tensors."""
    small = {key: value for key, value in changes.items() if isinstance(value, np.ndarray)}
    settings = BASE | {
        key.replace("__", "."): value for key, value in changes.items() if key not in small
    }
    values = {f"{architecture}.{key}": value for key, value in settings.items()}
    metadata = Metadata(Path("a.gguf"), {"general.architecture": architecture, **values})
    tensors = {f"{name}.weight": value for name, value in small.items()}
    return read_gguf_config(metadata, 100, names, tensors)


def refusal(architecture: str, **changes: Any) -> str:
    with pytest.raises(ImportFailed) as caught:
        read(architecture, **changes)
    return str(caught.value)


@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
def test_every_architecture_names_all_the_tensors_that_it_has(architecture: str) -> None:
    biases = frozenset({"blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_up.bias"})
    config = read(architecture, NAMES | biases)
    parts = {name.split(".")[-1] for name in tensor_shapes(config) if name.startswith("layers.")}
    assert parts <= GGUF_ARCHITECTURES[architecture].layer_tensors.keys()


def test_what_the_file_does_not_say_is_what_llama_cpp_knows() -> None:
    gemma = read("gemma2")
    assert (gemma.attention_softcap, gemma.logits_softcap) == (50.0, 30.0)
    assert [layer.window for layer in gemma.layers] == [4096, 0] * 3
    assert (gemma.embedding_scale, gemma.attention_scale) == (8.0, 0.25)
    assert read("smollm3").ropes == (plain_rope(16, 1e4), NO_ROPE)
    assert [layer.rope for layer in read("smollm3").layers] == [0, 0, 0, 1, 0, 0]


def test_the_largest_gemmas_scale_by_the_width() -> None:
    wide = read("gemma2", block_count=46, embedding_length=4608, attention__head_count=32)
    assert wide.attention_scale == pytest.approx(144**-0.5)


def test_gemma3_has_a_base_of_its_own_for_windowed_layers() -> None:
    config = read("gemma3", attention__sliding_window=512, rope__freq_base=1e6,
                  rope__scaling__type="linear", rope__scaling__factor=8.0)  # fmt: skip
    assert config.ropes == (linear_rope(16, 1e6, 8.0), plain_rope(16, 1e4))
    assert config.layers == (LayerConfig(512, 1),) * 5 + (LayerConfig(0, 0),)


def test_a_list_of_windowed_layers_counts_more_than_the_pattern() -> None:
    marks = [True, False, True, True, False, False]
    metadata: dict[str, Any] = {
        "attention__sliding_window": 512,
        "attention__sliding_window_pattern": marks,
    }
    config = read("olmo2", **metadata)
    assert [layer.window for layer in config.layers] == [512, 0, 512, 512, 0, 0]


def test_rope_scaling_is_read() -> None:
    assert read("llama", rope__scaling__factor=4.0).ropes == (linear_rope(16, 1e4, 4.0),)
    assert read("llama", rope__scale_linear=4.0).ropes == (linear_rope(16, 1e4, 4.0),)
    none = read("llama", rope__scaling__type="none", rope__scaling__factor=4.0)
    assert none.ropes == (plain_rope(16, 1e4),)
    yarn = read("qwen2", rope__scaling__type="yarn", rope__scaling__factor=4.0,
                rope__scaling__original_context_length=1024)  # fmt: skip
    assert yarn.ropes == (yarn_rope(16, 1e4, 4.0, 1024),)


def test_factors_come_from_small_tensors() -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    (rope,) = read("llama", rope_freqs=factors).ropes
    plain = np.array(plain_rope(16, 1e4).frequencies)
    assert np.allclose(np.array(rope.frequencies) * factors, plain, rtol=1e-12)
    (rope,) = read("phi3", rope_factors_long=factors, rope_factors_short=factors * 2,
                   rope__scaling__original_context_length=1024,
                   rope__scaling__attn_factor=1.25).ropes  # fmt: skip
    assert (rope.original_length, rope.magnitude) == (1024, 1.25)
    assert np.allclose(np.array(rope.frequencies_for(1024)) * factors * 2, plain, rtol=1e-12)
    assert np.allclose(np.array(rope.frequencies_for(1025)) * factors, plain, rtol=1e-12)


def test_granites_scales_are_read_and_zeros_count_as_absent() -> None:
    config = read("granite", attention__scale=0.5, embedding_scale=12.0, residual_scale=0.25,
                  logit_scale=8.0)  # fmt: skip
    assert (config.attention_scale, config.embedding_scale) == (0.5, 12.0)
    assert (config.residual_scale, config.logits_scale) == (0.25, 0.125)
    off = read("llama", attention__scale=0.0, residual_scale=0.0, attention__sliding_window=0)
    assert (off.attention_scale, off.residual_scale, off.layers[0].window) == (0.25, 1.0, 0)


def test_biases_are_there_when_the_file_has_them() -> None:
    assert not read("qwen2").qkv_bias
    config = read("qwen2", NAMES | {"blk.0.attn_q.bias"})
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, False)


@pytest.mark.parametrize(
    ("architecture", "changes", "said"),
    [
        ("mamba", {}, "unsupported architecture 'mamba'; supported: llama, qwen2"),
        ("llama", {"expert_count": 8}, "llama.expert_count = 8 is not supported yet"),
        ("llama", {"rope__dimension_count": 8}, "llama.rope.dimension_count = 8 with heads of 16"),
        ("phi3", {"rope__dimension_count": 18}, "phi3.rope.dimension_count = 18 with heads of 16"),
        ("qwen2", {"attention__value_length": 8}, "qwen2.attention.value_length = 8 with heads"),
        ("gemma3", {"attention__sliding_window_pattern": [True]}, "expected 6 truth values"),
        ("phi3", {"rope__scaling__type": "longrope"}, "rope.scaling.type = 'longrope' is not"),
        ("phi3", {"rope_factors_long": np.ones(8, np.float32)}, "rope_factors_short.weight' is mi"),
        ("llama", {"rope_freqs": np.ones(7, np.float32)}, "must hold 8 numbers above 0"),
        ("llama", {"rope_freqs": np.zeros(8, np.float32)}, "must hold 8 numbers above 0"),
        (
            "llama",
            {"rope_freqs": np.ones(8, np.float32), "rope__scaling__factor": 2.0},
            "rope_freqs.weight together with llama.rope.scaling.type is not supported",
        ),
        ("qwen2", {"rope__scaling__yarn_attn_factor": 1.5}, "yarn_attn_factor = 1.5 is not"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "expected a finite number above 0"),
    ],
)
def test_settings_that_are_not_done_are_refused_by_name(
    architecture: str, changes: dict[str, Any], said: str
) -> None:
    assert said in refusal(architecture, **changes)


def test_interleaved_rows_are_those_of_the_architectures_that_rotate_pairs() -> None:
    rotated = {name for name, each in ARCHITECTURES.items() if each.tensors.interleaved}
    assert rotated == {"llama", "granite", "smollm3"}
