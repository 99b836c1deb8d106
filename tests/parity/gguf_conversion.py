"""The same tiny models as GGUF files, with the names, keys and row orders of llama.cpp's converter.

Written in the other direction than the importer's tables, from what the format's own tools do:
q and k of the Llama-like ones in interleaved order, Gemma's norm weights with 1 added, Llama 3.1's
scaling as a tensor, LongRoPE's factors as two.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from engine.architectures.rope import base_frequencies, llama3_rope
from tests.engine.gguf_files import (
    GgufParts,
    Metadata,
    encode_tensor,
    tiny_tokenizer_metadata,
    write_gguf,
)
from tests.parity.families import VOCAB_SIZE, Family

Weights = NDArray[np.float32]
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
INTERLEAVED = ("llama", "granite", "smollm3")
GLOBAL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def architecture_of(family: Family) -> str:
    return ARCHITECTURES.get(family.model_type, family.model_type)


def write_as_gguf(model: PreTrainedModel, family: Family, path: Path) -> Path:
    architecture, settings = architecture_of(family), family.settings
    tensors = {}
    for name, parameter in model.named_parameters():
        values: Weights = parameter.detach().numpy()
        tensors[tensor_name(name, architecture)] = convert(name, values, family)
    tensors |= rope_tensors(settings)
    metadata = own_metadata(family) | tiny_tokenizer_metadata(VOCAB_SIZE)
    encoded = {name: encode_tensor(values, "F32") for name, values in tensors.items()}
    return write_gguf(path, GgufParts(metadata, encoded))


def tensor_name(name: str, architecture: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    after = architecture.startswith("gemma") or architecture == "olmo2"
    names = LAYER_NAMES | {
        "post_attention_layernorm": "post_attention_norm" if after else "ffn_norm"
    }
    return f"blk.{layer}.{names[part]}.{kind}"


def convert(name: str, values: Weights, family: Family) -> Weights:
    if family.model_type.startswith("gemma") and "norm" in name:
        return values + 1
    if architecture_of(family) in INTERLEAVED:
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                return interleaved(values, family.settings[heads])
    return values


def interleaved(values: Weights, num_heads: int) -> Weights:
    halves = values.reshape(num_heads, 2, len(values) // num_heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def rope_tensors(settings: Mapping[str, Any]) -> dict[str, Weights]:
    rope = settings.get("rope_parameters", {})
    if rope.get("rope_type") == "llama3":
        size, theta = settings["head_dim"], rope["rope_theta"]
        numbers = [
            rope[key]
            for key in (
                "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
            )
        ]  # fmt: skip
        scaled = np.array(llama3_rope(size, theta, *numbers).frequencies)
        return {"rope_freqs.weight": (base_frequencies(size, theta) / scaled).astype(np.float32)}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{length}.weight": np.array(rope[f"{length}_factor"], np.float32)
            for length in ("long", "short")
        }
    return {}


def own_metadata(family: Family) -> Metadata:
    architecture, settings = architecture_of(family), family.settings
    numbers: dict[str, Any] = {
        "block_count": settings["num_hidden_layers"],
        "context_length": settings["max_position_embeddings"],
        "embedding_length": settings["hidden_size"],
        "feed_forward_length": settings["intermediate_size"],
        "attention.head_count": settings["num_attention_heads"],
        "attention.head_count_kv": settings["num_key_value_heads"],
        "attention.key_length": settings["head_dim"],
        "attention.value_length": settings["head_dim"],
        "attention.layer_norm_rms_epsilon": settings["rms_norm_eps"],
        **rope_metadata(settings),
    }
    for key, ours in {
        "sliding_window": "attention.sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "embedding_multiplier": "embedding_scale",
        "logits_scaling": "logit_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
    }.items():
        if settings.get(key) is not None:
            numbers[ours] = settings[key]
    own = {f"{architecture}.{key}": value for key, value in numbers.items()}
    return {"general.architecture": architecture, "general.name": family.model_type, **own}


def rope_metadata(settings: Mapping[str, Any]) -> dict[str, Any]:
    rope = settings.get("rope_parameters", {})
    rope = rope.get("full_attention", rope)
    kind = rope.get("rope_type", "default")
    size = int(settings["head_dim"] * rope.get("partial_rotary_factor", 1.0))
    found = {"rope.freq_base": rope.get("rope_theta", 10_000.0), "rope.dimension_count": size}
    if "rope_local_base_freq" in settings:
        found["rope.freq_base_swa"] = settings["rope_local_base_freq"]
    original = settings.get("original_max_position_embeddings")
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": rope["factor"]}
        original = rope.get("original_max_position_embeddings")
    if kind == "longrope":
        growth = settings["max_position_embeddings"] / settings["original_max_position_embeddings"]
        original = settings["original_max_position_embeddings"]
        found["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(growth) / np.log(original)))
    if original is not None:
        found["rope.scaling.original_context_length"] = original
    return found
