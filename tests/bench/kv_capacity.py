"""How many sequences of a length fit into the bytes that some of them take in f32. Pure."""

from __future__ import annotations

from engine.architectures.config import ModelConfig
from engine.kv_cache import PagedKVCache, num_blocks_for
from engine.kv_format import BLOCK_SIZE, KV_FORMATS

NUM_F32 = 100
LENGTH = 1024


def sequences_of_f32(config: ModelConfig) -> dict[str, float]:
    """Format → sequences of `LENGTH` tokens that fit where `NUM_F32` of them fit in f32, as a
    factor. Whole blocks and whole sequences; scales are counted, as the pages have them."""
    blocks_each = -(-LENGTH // BLOCK_SIZE)
    f32_block = PagedKVCache(config, KV_FORMATS["f32"], 1).num_bytes
    budget = f32_block * blocks_each * NUM_F32
    fitting = {
        name: num_blocks_for(config, kv_format, budget, budget) // blocks_each
        for name, kv_format in KV_FORMATS.items()
    }
    return {name: count / NUM_F32 for name, count in fitting.items()}
