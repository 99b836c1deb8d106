"""The numbers of plain Llama-like models, for tests that need a config and no weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from engine.architectures.config import ModelConfig
from engine.architectures.rope import plain_rope, same_layers


def make_config(
    num_layers: int = 1, head_size: int = 8, rope_theta: float = 10_000.0, **changes: Any
) -> ModelConfig:
    """A tiny model; `changes` are fields of `ModelConfig`."""
    config = ModelConfig(
        architecture="llama",
        hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_size=head_size,
        vocab_size=64,
        context_length=512,
        rms_norm_eps=1e-5,
        layers=same_layers(num_layers),
        ropes=(plain_rope(head_size, rope_theta),),
        attention_scale=head_size**-0.5,
        tied_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(),
        add_bos=False,
    )
    return dataclasses.replace(config, **changes)
