"""The pages' shapes, and how many blocks a budget holds."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import DoesNotFit
from engine.kv_cache import PagedKVCache, num_blocks_for
from engine.kv_format import F32, INT4, INT8, INT8_KEYS_INT4_VALUES, KVFormat
from tests.model_configs import make_config

CONFIG = make_config(num_heads=6, num_kv_heads=2, head_size=64)
BLOCK_BYTES = {"f32": 2 * 2 * 260 * 16, "int8": 2 * 2 * 68 * 16, "int4": 2 * 2 * 40 * 16}


@pytest.mark.parametrize(
    ("kv_format", "keys", "values", "dtypes", "groups"),
    [
        (F32, (64, 16, 1), (1, 16, 64, 1), (np.float32, np.float32), (1, 1)),
        (INT8, (16, 16, 4), (4, 4, 16, 4), (np.uint8, np.int8), (1, 1)),
        (INT4, (8, 16, 4), (2, 4, 16, 4), (np.uint8, np.uint8), (2, 2)),
        (INT8_KEYS_INT4_VALUES, (16, 16, 4), (2, 4, 16, 4), (np.uint8, np.uint8), (1, 2)),
    ],
)
def test_pages_have_the_documented_shapes(
    kv_format: KVFormat,
    keys: tuple[int, ...],
    values: tuple[int, ...],
    dtypes: tuple[type[np.generic], type[np.generic]],
    groups: tuple[int, int],
) -> None:
    cache = PagedKVCache(CONFIG, kv_format, 5)
    (pages,) = cache.layers
    assert pages.keys.shape == (5, 2, *keys) and pages.values.shape == (5, 2, *values)
    assert (pages.keys.dtype.type, pages.values.dtype.type) == dtypes
    assert pages.key_scales.shape == (5, 2, groups[0], 16)
    assert pages.value_scales.shape == (5, 2, groups[1], 16)
    assert pages.key_scales.dtype == pages.value_scales.dtype == np.float32
    assert pages.arrays == (pages.keys, pages.values, pages.key_scales, pages.value_scales)
    assert all(array.flags.c_contiguous for array in pages.arrays)


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
