"""The tiny models of the parity tests: one or more of every family, as transformers configs.

Sizes are odd on purpose (heads that fill no vector, groups of 1 to 16, padded vocabularies), and
windows, trained lengths and softcaps so small that a text of 160 tokens goes far beyond them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

VOCAB_SIZE = 320
TRAINED = 64
NUM_TOKENS = 160


@dataclass(frozen=True)
class Family:
    """`settings` of the transformers config of `model_type`.

    `without`: changes of `config.json` that each must make a visible difference. `max_model_len`:
    of the engine, where the rope depends on it; `num_tokens`: of the text.
    """

    model_type: str
    settings: Mapping[str, Any]
    without: Mapping[str, Any] = field(default_factory=dict)
    max_model_len: int = 256
    num_tokens: int = NUM_TOKENS


def sizes(heads: int, kv_heads: int, head_size: int, **changes: Any) -> dict[str, Any]:
    """Common to all families; `changes` are laid over it."""
    common = {
        "hidden_size": 16 * heads,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return common | changes


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


def factors(size: int, start: float, end: float) -> list[float]:
    step = (end - start) / (size - 1)
    return [round(start + i * step, 4) for i in range(size)]


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=TRAINED,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=TRAINED)
PLAIN = rope("default")
PHI_ROPE = {
    "original_max_position_embeddings": TRAINED,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": factors(9, 1.0, 1.6),
        "long_factor": factors(9, 1.1, 7.0),
    },
}
GEMMA3_ROPES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
    }
}
NO_SCALING = PLAIN["rope_parameters"]

FAMILIES: Mapping[str, Family] = {
    "llama-1": Family("llama", sizes(4, 4, 20)),
    "llama-2-gqa-bias": Family(
        "llama", sizes(6, 2, 80, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    ),
    "llama-3.1": Family(
        "llama",
        sizes(8, 2, 16, tie_word_embeddings=True) | LLAMA3,
        without={"rope_parameters": NO_SCALING},
    ),
    "llama-linear": Family(
        "llama",
        sizes(3, 1, 24, max_position_embeddings=TRAINED) | rope("linear", factor=4.0),
        without={"rope_parameters": NO_SCALING},
    ),
    # transformers takes the base of the text's own length: equal to ours at the full length only.
    "llama-dynamic": Family(
        "llama",
        sizes(5, 5, 18, max_position_embeddings=TRAINED) | rope("dynamic", factor=2.0),
        without={"rope_parameters": NO_SCALING},
        max_model_len=2 * TRAINED,
        num_tokens=2 * TRAINED,
    ),
    "llama-dynamic-short": Family(
        "llama",
        sizes(5, 5, 18, max_position_embeddings=TRAINED) | rope("dynamic", factor=2.0),
        max_model_len=TRAINED,
        num_tokens=TRAINED,
    ),
    "smollm2": Family("llama", sizes(9, 3, 64, tie_word_embeddings=True) | PLAIN),
    "mistral": Family(
        "mistral", sizes(16, 1, 32, sliding_window=37), without={"sliding_window": None}
    ),
    "mistral-global": Family("mistral", sizes(32, 2, 16, sliding_window=None)),
    "qwen2": Family("qwen2", sizes(7, 7, 16)),
    "qwen2-yarn": Family(
        "qwen2", sizes(4, 2, 16) | YARN, without={"rope_parameters": NO_SCALING}
    ),
    "qwen2-window": Family(
        "qwen2",
        sizes(4, 2, 16, use_sliding_window=True, sliding_window=40, max_window_layers=1),
        without={"layer_types": ["full_attention"] * 3},
    ),
    "qwen3": Family("qwen3", sizes(6, 3, 48, tie_word_embeddings=True)),
    "phi3": Family("phi3", sizes(6, 3, 16, sliding_window=29), without={"sliding_window": None}),
    "phi3.5-short": Family(
        "phi3",
        sizes(4, 4, 24, hidden_size=96) | PHI_ROPE,
        max_model_len=TRAINED,
        num_tokens=TRAINED,
    ),
    "phi3.5-long": Family(
        "phi3",
        sizes(4, 4, 24, hidden_size=96) | PHI_ROPE,
        without={"rope_parameters": NO_SCALING},
    ),
    "gemma2": Family(
        "gemma2",
        sizes(
            4, 2, 256, query_pre_attn_scalar=100, sliding_window=33, attn_logit_softcapping=3.0,
            final_logit_softcapping=2.0,
        ),
        without={
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 256,
            "sliding_window": 10_000,
        },
    ),
    "gemma3": Family(
        "gemma3_text",
        sizes(4, 1, 100, num_hidden_layers=7, sliding_window=21, query_pre_attn_scalar=50)
        | GEMMA3_ROPES,
        without={
            "sliding_window": 10_000,
            "query_pre_attn_scalar": 100,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 100_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
            },
        },
    ),
    "smollm3": Family(
        "smollm3",
        sizes(4, 1, 16, num_hidden_layers=5, tie_word_embeddings=True),
        without={"no_rope_layers": [1, 1, 1, 1, 1]},
    ),
    "smollm3-window": Family(
        "smollm3",
        sizes(
            4, 1, 16, num_hidden_layers=5, use_sliding_window=True, sliding_window=30,
            no_rope_layers=[1, 0, 1, 0, 1], attention_bias=True,
        ),
        without={"sliding_window": 10_000},
    ),
    "granite": Family(
        "granite",
        sizes(
            6, 2, 16, embedding_multiplier=3.0, logits_scaling=0.5, residual_multiplier=0.4,
            attention_multiplier=0.4, mlp_bias=True,
        ),
        without={
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 0.25,
        },
    ),
    "olmo2": Family("olmo2", sizes(6, 2, 16)),
}  # fmt: skip


def adapted(name: str, **changes: Any) -> Family:
    """The family as a GGUF can say it: some numbers are fixed by llama.cpp's own code there."""
    family = FAMILIES[name]
    return replace(family, settings={**family.settings, **changes})


GEMMA3_LOCAL = GEMMA3_ROPES["rope_parameters"] | {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}
}
GGUF_FAMILIES: Mapping[str, Family] = {
    **{
        name: FAMILIES[name]
        for name in (
            "llama-1", "llama-2-gqa-bias", "llama-3.1", "llama-linear", "smollm2", "mistral",
            "qwen2", "qwen2-yarn", "qwen3", "phi3", "phi3.5-short", "phi3.5-long",
            "granite", "olmo2",
        )
    },
    "smollm3": adapted("smollm3", **PLAIN),
    "gemma2": adapted("gemma2", query_pre_attn_scalar=256),
    "gemma3": adapted("gemma3", query_pre_attn_scalar=100, rope_parameters=GEMMA3_LOCAL),
}  # fmt: skip
