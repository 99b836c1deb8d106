"""What keys and values of sequences take, by format and length. Knows a model's numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.architectures.config import ModelConfig
from engine.kv_format import BLOCK_SIZE, KV_FORMATS


def kv_bytes_per_token(config: ModelConfig) -> dict[str, int]:
    """Bytes of one token's keys and values over all layers, for each format of the KV cache."""
    sizes = (config.num_layers, config.num_kv_heads, config.head_size)
    return {name: each.bytes_per_token(*sizes) for name, each in KV_FORMATS.items()}


@dataclass(frozen=True, slots=True)
class KvUse:
    """A sequence of `num_tokens` in one format: its bytes in whole blocks, and how many fit."""

    kv_format: str
    num_tokens: int
    sequence_bytes: int
    num_fitting: int


def kv_uses(config: ModelConfig, contexts: Sequence[int], budget_bytes: int) -> list[KvUse]:
    """For every format and length; blocks are not divided between sequences."""
    uses = []
    for name, per_token in kv_bytes_per_token(config).items():
        block_bytes = per_token * BLOCK_SIZE
        for num_tokens in contexts:
            num_blocks = -(-num_tokens // BLOCK_SIZE)
            fitting = budget_bytes // block_bytes // num_blocks
            uses.append(KvUse(name, num_tokens, num_blocks * block_bytes, fitting))
    return uses


def contexts_up_to(limit: int) -> tuple[int, ...]:
    """1K, 2K, 4K … and the model's own limit."""
    powers = [2**power for power in range(10, limit.bit_length()) if 2**power < limit]
    return (*powers, limit)
