"""config.json to numbers: spellings old and new, what families differ in, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.architectures.config import LayerConfig, ModelConfig
from engine.architectures.hf import FAMILIES, HF_ARCHITECTURES, read_hf_config
from engine.architectures.rope import NO_ROPE, linear_rope, llama3_rope, plain_rope, yarn_rope
from engine.architectures.table import tensor_shapes
from engine.errors import ImportFailed
from engine.importers.gguf_metadata import Metadata

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(model_type: str, **changes: Any) -> ModelConfig:
    document = BASE | {"model_type": model_type} | changes
    return read_hf_config(Metadata(Path("config.json"), {}), document)


def refusal(model_type: str, **changes: Any) -> str:
    with pytest.raises(ImportFailed) as caught:
        read(model_type, **changes)
    return str(caught.value)


def windows(config: ModelConfig) -> list[int]:
    return [layer.window for layer in config.layers]


@pytest.mark.parametrize("model_type", HF_ARCHITECTURES)
def test_every_family_names_all_the_tensors_that_it_has(model_type: str) -> None:
    config = read(model_type, attention_bias=True, mlp_bias=True)
    parts = {name.split(".")[-1] for name in tensor_shapes(config) if name.startswith("layers.")}
    biases = {part for part in parts if part.endswith("_bias")} if model_type == "phi3" else set()
    assert parts - biases <= HF_ARCHITECTURES[model_type].layer_tensors.keys()


def test_numbers_that_a_file_leaves_out_are_those_of_its_family() -> None:
    llama = read("llama", head_dim=None, num_key_value_heads=None)
    assert (llama.head_size, llama.num_kv_heads, llama.rms_norm_eps) == (16, 4, 1e-6)
    assert (llama.tied_embeddings, llama.attention_scale) == (False, 0.25)
    gemma = read("gemma2", head_dim=16)
    assert (gemma.tied_embeddings, gemma.attention_scale) == (True, 1 / 16)
    assert (gemma.attention_softcap, gemma.logits_softcap) == (50.0, 30.0)
    assert (gemma.embedding_scale, gemma.activation) == (8.0, "gelu_tanh")
    assert read("smollm3").ropes == (plain_rope(16, 2_000_000.0), NO_ROPE)


def test_a_null_is_not_the_familys_default() -> None:
    assert windows(read("mistral")) == [4096] * 6
    assert windows(read("mistral", sliding_window=None)) == [0] * 6
    assert read("gemma2", final_logit_softcapping=None).logits_softcap == 0.0


def test_rope_is_read_in_the_old_and_the_new_spelling() -> None:
    old = read("llama", rope_theta=5e5, rope_scaling={**LLAMA3, "type": "llama3"})
    new = read("llama", rope_parameters={**LLAMA3, "rope_theta": 5e5})
    assert old.ropes == new.ropes == (llama3_rope(16, 5e5, 8.0, 1.0, 4.0, 8192),)
    older = {key: value for key, value in LLAMA3.items() if key != "rope_type"}
    assert (
        read("llama", rope_theta=5e5, rope_scaling={**older, "type": "llama3"}).ropes == old.ropes
    )


def test_scaling_makes_the_context_longer_where_the_file_does_not_say_so_yet() -> None:
    linear = {"type": "linear", "factor": 4.0}
    assert read("llama", rope_scaling=linear).context_length == 4 * 4096
    assert read("llama", rope_scaling={**linear, "type": "dynamic"}).context_length == 4 * 4096
    assert read("gemma3_text", rope_scaling={**linear}).context_length == 4096
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert read("qwen2", rope_scaling=yarn).context_length == 4 * 4096
    assert read("qwen2", rope_scaling=yarn).ropes == (yarn_rope(16, 1e4, 4.0, 4096),)
    assert read("llama", rope_scaling=LLAMA3).context_length == 4096


def test_yarns_magnitude_follows_the_files_settings() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert read("qwen2", rope_scaling=yarn | {"attention_factor": 1.5}).ropes[0].magnitude == 1.5
    equal = read("qwen2", rope_scaling=yarn | {"mscale": 1.0, "mscale_all_dim": 1.0})
    assert equal.ropes[0].magnitude == 1.0


def test_gemma3_has_a_rope_for_each_type_of_layer_in_both_spellings() -> None:
    old = read("gemma3_text", rope_theta=1e6, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert old.ropes == (linear_rope(16, 1e6, 8.0), plain_rope(16, 1e4))
    assert old.layers == (LayerConfig(4096, 1),) * 5 + (LayerConfig(0, 0),)
    new = read(
        "gemma3_text",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )
    assert (new.ropes, new.layers) == (old.ropes, old.layers)
    assert read("gemma3", sliding_window_pattern=2).layers[1] == LayerConfig(0, 0)


def test_windows_follow_the_familys_pattern() -> None:
    assert windows(read("gemma2")) == [4096, 0] * 3
    assert windows(read("qwen2")) == [0] * 6
    qwen = read("qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=4)
    assert windows(qwen) == [0] * 4 + [32] * 2
    assert windows(read("phi3", sliding_window=2047)) == [2047] * 6
    smol = read("smollm3", use_sliding_window=True, sliding_window=8)
    assert [(layer.window, layer.rope) for layer in smol.layers[2:5]] == [(0, 0), (8, 1), (0, 0)]


def test_phi3_rotates_a_part_of_the_head_with_factors_for_two_lengths() -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    config = read(
        "phi3", original_max_position_embeddings=1024, partial_rotary_factor=0.75,
        rope_scaling=scaling,
    )  # fmt: skip
    (rope,) = config.ropes
    assert (rope.rotary_size, rope.original_length, rope.scaling) == (12, 1024, "longrope")
    assert rope.magnitude == pytest.approx((1 + 2 / 10) ** 0.5)  # log(4) / log(1024)
    renamed = read(
        "phi3", original_max_position_embeddings=1024, partial_rotary_factor=0.75,
        rope_scaling={**scaling, "type": "yarn"},
    )  # fmt: skip
    assert renamed.ropes == config.ropes


def test_granites_multipliers_are_read() -> None:
    config = read(
        "granite", attention_multiplier=0.5, embedding_multiplier=12.0, residual_multiplier=0.25,
        logits_scaling=8.0,
    )  # fmt: skip
    assert (config.attention_scale, config.embedding_scale) == (0.5, 12.0)
    assert (config.residual_scale, config.logits_scale) == (0.25, 0.125)
    assert read("llama", residual_multiplier=0.25).residual_scale == 1.0


def test_biases_are_where_the_family_has_them() -> None:
    llama = read("llama", attention_bias=True)
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, False)
    qwen = read("qwen2")
    assert (qwen.qkv_bias, qwen.output_bias) == (True, False)


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("mamba", {}, "models of type 'mamba' cannot be imported; supported: gemma2, "),
        ("qwen3_moe", {"num_experts": 128}, "'qwen3_moe' is a mixture of experts"),
        ("mixtral", {"num_local_experts": 8}, "'mixtral' is a mixture of experts"),
        ("llama", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not supported"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attention = True is not supported"),
        ("llama", {"rope_scaling": {"type": "mrope"}}, "RoPE scaling 'mrope' is not supported"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "warp": 3}},
            "RoPE setting warp = 3 is not supported",
        ),
        ("llama", {"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ("llama", {"rope_scaling": 5}, "'rope_scaling' is 5, expected an object"),
        ("llama", {"partial_rotary_factor": 0.2}, "partial_rotary_factor = 0.2 of heads of 16"),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 7,
                                   "long_factor": [1.0] * 8}}, "'short_factor' is"),
        ("llama", {"layer_types": ["sliding_attention"] * 6}, "layer_types = ['sliding"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 6}, "layer_types = ['sliding"),
        ("qwen3", {"layer_types": ["linear_attention"] * 6}, "layer_types = ['linear"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types = ['full_attention']"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers = [1, 0] is not supported"),
        ("llama", {"num_key_value_heads": 3}, "4 heads and 3 KV heads do not fit together"),
        ("llama", {"hidden_size": 0}, "'hidden_size' is 0, expected an integer from 1"),
        ("llama", {"rms_norm_eps": float("nan")}, "is nan, expected a finite number above 0"),
    ],
)  # fmt: skip
def test_settings_that_are_not_done_are_refused_by_name(
    model_type: str, changes: dict[str, Any], said: str
) -> None:
    assert said in refusal(model_type, **changes)


def test_every_family_has_a_name_of_its_own() -> None:
    assert len({family.name for family in FAMILIES.values()}) == len(FAMILIES)
