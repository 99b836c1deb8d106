"""Rows into pages and out of them: as the attention kernel writes them, as the reference reads."""

from __future__ import annotations

import numpy as np
import pytest

from engine.attention import dequantize, keys_by_token, values_by_token
from engine.kernels.attention_kernel import KernelAttention
from engine.kv_cache import PagedKVCache
from engine.kv_format import F32, KV_FORMATS, KVFormat
from engine.page_rows import PageRows
from tests.batches import Span, int32, make_batch
from tests.loaded_model import spoil
from tests.model_configs import make_config

MAX_LEN, NUM_BLOCKS = 256, 8
every_format = pytest.mark.parametrize("kv_format", KV_FORMATS.values(), ids=KV_FORMATS)
every_head_size = pytest.mark.parametrize("head_size", [32, 24, 80])


def make_cache(kv_format: KVFormat, head_size: int) -> tuple[PagedKVCache, PageRows]:
    config = make_config(num_layers=2, head_size=head_size)
    cache = PagedKVCache(config, kv_format, NUM_BLOCKS)
    spoil(cache)
    return cache, PageRows(config, kv_format, MAX_LEN)


@every_format
@every_head_size
def test_pages_are_written_as_the_attention_writes_them(
    kernels: None, kv_format: KVFormat, head_size: int
) -> None:
    config = make_config(num_layers=2, head_size=head_size)
    expected, _ = make_cache(kv_format, head_size)
    found, rows = make_cache(kv_format, head_size)
    batch = make_batch([Span([0] * 20, [3, 1], 2), Span([0], [5, 6], 17)])
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((21, config.qkv_size), np.float32)
    qkv[7, -1] = np.nan
    attention = KernelAttention(config, kv_format, MAX_LEN, 32, 1)
    out = np.zeros((21, config.num_heads * head_size), np.float32)
    new_rows = np.ascontiguousarray(qkv[:, config.num_heads * head_size :])
    attention.begin(batch)(qkv, expected.layers[1], out)
    rows.write(new_rows, batch.positions, batch.slot_mapping, found.layers[1])
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        for array, other in zip(ours.arrays, theirs.arrays, strict=True):
            np.testing.assert_array_equal(array, other)


@every_format
@every_head_size
def test_earlier_tokens_are_gathered_side_by_side(
    kernels: None, kv_format: KVFormat, head_size: int
) -> None:
    cache, rows = make_cache(kv_format, head_size)
    pages = cache.layers[0]
    pages.key_scales[:] = np.random.default_rng(1).random(pages.key_scales.shape)
    pages.value_scales[:] = np.random.default_rng(2).random(pages.value_scales.shape)
    tables, num_past = int32([[4, 2, 7], [0, 0, 0], [1, 3, 0]]), int32([37, 0, 16])
    num_kv_heads = pages.keys.shape[1]
    keys = np.full((num_kv_heads, head_size, 64), 5, np.float32)
    values = np.full((num_kv_heads, 64, head_size), 5, np.float32)
    lost = rows.gather(tables, num_past, pages, keys, values)

    all_keys = dequantize(keys_by_token(pages.keys), pages.key_scales, kv_format.keys)
    all_values = dequantize(values_by_token(pages.values), pages.value_scales, kv_format.values)
    tokens = [(4, 16), (2, 16), (7, 5), (1, 16)]
    for stored, found in ((all_keys, keys.swapaxes(1, 2)), (all_values, values)):
        parts = [stored[block, :, :count, :head_size] for block, count in tokens]
        expected = np.concatenate(parts, axis=1)
        np.testing.assert_array_equal(found[:, :53], expected)
        assert (found[:, 53:] == 5).all()
    assert not lost.any()


def test_a_token_that_is_not_finite_becomes_zeros_and_its_sequence_is_named(
    kernels: None,
) -> None:
    cache, rows = make_cache(F32, 32)
    pages = cache.layers[0]
    pages.key_scales[:] = 1
    pages.key_scales[2, 0, 0, 3] = np.nan
    pages.value_scales[5, 0, 0, 1] = np.inf
    heads = pages.keys.shape[1]
    keys, values = np.ones((heads, 32, 48), np.float32), np.ones((heads, 48, 32), np.float32)
    tables = int32([[0], [2], [2], [5]])
    lost = rows.gather(tables, int32([16, 4, 3, 2]), pages, keys, values)
    assert lost.tolist() == [False, True, False, True]
    assert not keys[0, :, 19].any() and not values[0, 19].any()
    assert not keys[0, :, 24].any()
    assert np.isfinite(keys).all() and np.isfinite(values).all()
