"""The pages' shapes, and how many blocks a budget holds."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import DoesNotFit
from engine.kv_cache import PagedKVCache, num_blocks_for
from engine.kv_format import F32, INT4, INT8, KVFormat
from tests.model_configs import make_config

CONFIG = make_config(num_heads=6, num_kv_heads=2, head_size=64)
BLOCK_BYTES = {"f32": 2 * 2 * 260 * 16, "int8": 2 * 2 * 68 * 16, "int4": 2 * 2 * 40 * 16}


@pytest.mark.parametrize(
    ("kv_format", "dtype", "size", "groups"),
    [(F32, np.float32, 64, 1), (INT8, np.int8, 64, 1), (INT4, np.uint8, 32, 2)],
)
def test_pages_have_the_documented_shapes(
    kv_format: KVFormat, dtype: type[np.generic], size: int, groups: int
) -> None:
    cache = PagedKVCache(CONFIG, kv_format, 5)
    (pages,) = cache.layers
    assert pages.keys.shape == (5, 2, size, 16) and pages.keys.dtype == dtype
    assert pages.values.shape == (5, 2, 16, size) and pages.values.dtype == dtype
    assert pages.key_scales.shape == pages.value_scales.shape == (5, 2, groups, 16)
    assert pages.key_scales.dtype == np.float32
    assert pages.arrays == (pages.keys, pages.values, pages.key_scales, pages.value_scales)


@pytest.mark.parametrize("kv_format", [F32, INT8, INT4])
def test_the_cache_takes_what_its_budget_was_computed_with(kv_format: KVFormat) -> None:
    block_bytes = BLOCK_BYTES[kv_format.name]
    assert PagedKVCache(CONFIG, kv_format, 7).num_bytes == 7 * block_bytes
    assert num_blocks_for(CONFIG, kv_format, 7 * block_bytes, 10**6) == 7
    assert num_blocks_for(CONFIG, kv_format, 8 * block_bytes - 1, 10**6) == 7


def test_no_more_blocks_are_taken_than_can_be_used() -> None:
    assert num_blocks_for(CONFIG, INT8, 10**12, 10) == 10


def test_a_budget_below_one_block_is_refused_with_the_numbers() -> None:
    message = r"budget of 4,351 bytes is less than one block of 4,352 bytes \(16 tokens, int8\)"
    with pytest.raises(DoesNotFit, match=message):
        num_blocks_for(CONFIG, INT8, 4351, 1000)
