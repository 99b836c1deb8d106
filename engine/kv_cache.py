"""The pages: one set of arrays per layer, allocated once. Knows not who owns which block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.architectures.config import ModelConfig
from engine.errors import DoesNotFit
from engine.kv_format import BLOCK_SIZE, KVFormat


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The pages of layer `layer`. B blocks of 16 tokens, H KV heads, G groups.

    `keys` [B, H, *key_shape], `values` [B, H, *value_shape], each in the dtype and with the shape
    and the G of its part of the format (`kv_format.py`); `key_scales`, `value_scales`
    [B, H, G, 16] float32. All contiguous.
    """

    layer: int
    keys: NDArray[np.generic]
    values: NDArray[np.generic]
    key_scales: NDArray[np.float32]
    value_scales: NDArray[np.float32]

    @property
    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        return self.keys, self.values, self.key_scales, self.value_scales


class PagedKVCache:
    """All layers' pages for `num_blocks` blocks. Zeroed lazily by the operating system."""

    def __init__(self, config: ModelConfig, kv_format: KVFormat, num_blocks: int) -> None:
        self.kv_format = kv_format
        self.num_blocks = num_blocks
        heads = (config.num_layers, num_blocks, config.num_kv_heads)
        size = kv_format.padded_size(config.head_size)
        key, value = kv_format.keys, kv_format.values
        keys = np.zeros((*heads, *key.key_shape(size)), key.dtype)
        values = np.zeros((*heads, *value.value_shape(size)), value.dtype)
        key_scales = np.zeros((*heads, key.num_groups(size), BLOCK_SIZE), np.float32)
        value_scales = np.zeros((*heads, value.num_groups(size), BLOCK_SIZE), np.float32)
        self.arrays = (keys, values, key_scales, value_scales)
        self.layers = tuple(
            LayerPages(i, keys[i], values[i], key_scales[i], value_scales[i])
            for i in range(config.num_layers)
        )
        self.num_bytes = keys.nbytes + values.nbytes + key_scales.nbytes + value_scales.nbytes


def num_blocks_for(
    config: ModelConfig, kv_format: KVFormat, budget_bytes: int, num_blocks_wanted: int
) -> int:
    """Blocks that fit in the budget. Raises DoesNotFit when not even one block does.

    `num_blocks_wanted` bounds it: room for every sequence at full length is enough.
    """
    per_token = kv_format.bytes_per_token(config.num_layers, config.num_kv_heads, config.head_size)
    block_bytes = per_token * BLOCK_SIZE
    num_blocks = min(budget_bytes // block_bytes, num_blocks_wanted)
    if num_blocks < 1:
        raise DoesNotFit(
            f"the KV cache budget of {budget_bytes:,} bytes is less than one block of "
            f"{block_bytes:,} bytes (16 tokens, {kv_format.name}): give --kv-memory more"
        )
    return num_blocks
