"""Paged attention over quantized pages: RoPE and page write, then softmax over what was written.

`NumpyAttention` is the reference, `attention_kernel.KernelAttention` the numba kernel; both have
the same method and one test runs both. Keys and values are always written to their page first and
read back from it, also inside a prefill chunk, and each query row is reduced in a fixed order (16
keys a vector, tiles of 128 keys, by position): a row's result does not depend on its batch.
The softmax is computed online over the tiles (Milakov & Gimelshein 2018; Dao et al. 2022). Over
quantized pages queries and weights are rounded to 16 bits (`rounded_attention.py`).
What layers differ in (window, rope) and models (scale, softcap) is in the config.
Knows arrays only: no segments, no sequences' ids.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.architectures.config import LayerConfig, ModelConfig, Rope
from engine.batch import Batch, Float32Array, Int32Array
from engine.kv_cache import LayerPages
from engine.kv_format import BLOCK_SIZE, MAX_MAGNITUDE, MIN_SCALE, KVFormat, PageFormat
from engine.rounded_attention import Tokens, rounded_attention
from engine.vector_sizes import INT4_GROUP_SIZE

Attend = Callable[[Float32Array, LayerPages, Float32Array], None]


class Attention(Protocol):
    def begin(self, batch: Batch) -> Attend:
        """One step's attention: attend(qkv, pages, out) is then called for each layer.

        `qkv` [T, (H + 2 * KV) * D]: queries, keys and values of each token. Rotates queries and
        keys, writes keys and values to the batch's slots, then sets `out` [T, H * D] to each
        token's attention over its sequence up to and including itself, or over the last tokens
        of it when the layer (`pages.layer`) has a window. A key or value that is not finite makes
        NaN of every query that may see it, and of no other.
        """
        ...


def rope_table(rope: Rope, num_positions: int) -> tuple[Float32Array, Float32Array]:
    """(cos, sin), each [num_positions, rotary_size / 2] float32, computed in float64.

    For an engine whose sequences have up to `num_positions` tokens.
    """
    frequencies = np.array(rope.frequencies_for(num_positions), np.float64)
    angles = np.outer(np.arange(num_positions, dtype=np.float64), frequencies)
    cos, sin = rope.magnitude * np.cos(angles), rope.magnitude * np.sin(angles)
    return cos.astype(np.float32), sin.astype(np.float32)


class NumpyAttention:
    """Plain numpy, one token at a time: what the kernel must equal within rounding."""

    def __init__(self, config: ModelConfig, kv_format: KVFormat, max_model_len: int) -> None:
        self._config = config
        self._format = kv_format
        self._padding = kv_format.padded_size(config.head_size) - config.head_size
        self._ropes = [rope_table(rope, max_model_len) for rope in config.ropes]

    def begin(self, batch: Batch) -> Attend:
        return partial(self._forward, batch)

    def _forward(
        self, batch: Batch, qkv: Float32Array, pages: LayerPages, out: Float32Array
    ) -> None:
        c, layer = self._config, self._config.layers[pages.layer]
        heads = qkv.reshape(len(qkv), -1, c.head_size)
        tables = self._ropes[layer.rope]
        queries = rotate(heads[:, : c.num_heads], batch.positions, *tables)
        queries *= np.float32(c.attention_scale)
        keys = heads[:, c.num_heads : c.num_heads + c.num_kv_heads]
        keys = rotate(keys, batch.positions, *tables)
        values = heads[:, c.num_heads + c.num_kv_heads :]
        for token, slot in enumerate(batch.slot_mapping):
            self._store(keys[token], values[token], pages, *divmod(int(slot), BLOCK_SIZE))
        self._attend(layer, queries, batch, pages, out)

    def _store(
        self, key: Float32Array, value: Float32Array, pages: LayerPages, block: int, offset: int
    ) -> None:
        key, value = (np.pad(x, [(0, 0), (0, self._padding)]) for x in (key, value))
        lane = pages.keys.shape[-1]
        row, column = divmod(offset, pages.values.shape[-1])
        for head in range(len(key)):
            finite = bool(_is_finite(key[head]).all() and _is_finite(value[head]).all())
            stored, scales = quantize(key[head], self._format.keys)
            pages.keys[block, head, :, offset] = stored.reshape(-1, lane)
            pages.key_scales[block, head, :, offset] = scales if finite else np.nan
            stored, scales = quantize(value[head], self._format.values)
            values = pages.values[block, head, :, row, :, column]
            values[:] = stored.reshape(values.shape)
            pages.value_scales[block, head, :, offset] = scales

    def _attend(
        self,
        layer: LayerConfig,
        queries: Float32Array,
        batch: Batch,
        pages: LayerPages,
        out: Float32Array,
    ) -> None:
        attend_one = self._rounded if self._format.keys.max_level else self._exact
        for s in range(batch.num_sequences):
            first, last = int(batch.query_starts[s]), int(batch.query_starts[s + 1])
            length = int(batch.context_lens[s])
            tokens = self._gather(pages, batch.block_tables[s, : -(-length // BLOCK_SIZE)])
            for token in range(first, last):
                end = length - (last - 1 - token)
                seen = slice(max(0, end - layer.window) if layer.window else 0, end)
                out[token] = attend_one(queries[token], tokens, seen).reshape(-1)

    def _gather(self, pages: LayerPages, blocks: np.ndarray) -> Tokens:
        """The blocks' tokens: [KV, tokens, D or G] each."""
        key, value = self._format.keys, self._format.values
        keys = unpack(keys_by_token(pages.keys[blocks]), key)
        values = unpack(values_by_token(pages.values[blocks]), value)
        scales = (x[blocks].swapaxes(-1, -2) for x in (pages.key_scales, pages.value_scales))
        return Tokens(*(self._by_head(x) for x in (keys, *scales, values)))

    def _by_head(self, x: Float32Array) -> Float32Array:
        """[blocks, KV, 16, n] → [KV, tokens, n]."""
        return x.swapaxes(0, 1).reshape(self._config.num_kv_heads, -1, x.shape[-1])

    def _exact(self, query: Float32Array, tokens: Tokens, seen: slice) -> Float32Array:
        c = self._config
        grouped = query.reshape(c.num_kv_heads, -1, c.head_size)  # [KV, G, D]
        keys, values = (x[:, seen, : c.head_size] for x in (tokens.keys, tokens.values))
        scores = np.einsum("hgd,hkd->hgk", grouped, keys * tokens.key_scales[:, seen])
        if c.attention_softcap:
            cap = np.float32(c.attention_softcap)
            scores = cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attended: Float32Array = np.einsum("hgk,hkd->hgd", weights, values)
        return attended

    def _rounded(self, query: Float32Array, tokens: Tokens, seen: slice) -> Float32Array:
        c = self._config
        grouped = query.reshape(c.num_kv_heads, -1, c.head_size)
        padded = np.pad(grouped, [(0, 0), (0, 0), (0, self._padding)])
        softcap = np.float32(c.attention_softcap)
        return rounded_attention(padded, tokens, seen, softcap)[..., : c.head_size]


def keys_by_token(keys: np.ndarray) -> np.ndarray:
    """`PageFormat.key_shape` → [16, elements], behind any other axes."""
    by_token = np.moveaxis(keys, -2, -3)
    return by_token.reshape(*by_token.shape[:-2], -1)


def values_by_token(values: np.ndarray) -> np.ndarray:
    """`PageFormat.value_shape` → [16, elements], behind any other axes."""
    by_token = np.moveaxis(values, (-3, -1), (-4, -3))  # [16 / lane, lane, elements, elements]
    shape = by_token.shape
    return by_token.reshape(*shape[:-4], shape[-4] * shape[-3], -1)


def rotate(
    x: Float32Array, positions: Int32Array, cos_table: Float32Array, sin_table: Float32Array
) -> Float32Array:
    """x [T, heads, D] with the first `rotary_size` elements of each head turned."""
    half = cos_table.shape[1]
    cos, sin = cos_table[positions][:, None], sin_table[positions][:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def _is_finite(x: Float32Array) -> NDArray[np.bool_]:
    finite: NDArray[np.bool_] = np.abs(x) < MAX_MAGNITUDE
    return finite


def quantize(x: Float32Array, page_format: PageFormat) -> tuple[np.ndarray, Float32Array]:
    """One head's padded [D] as (stored elements, scales [G]); zeros where it is not finite."""
    x = np.where(_is_finite(x), x, np.float32(0))
    if page_format.max_level == 0:
        return x, np.ones(1, np.float32)
    groups = x.reshape(page_format.num_groups(len(x)), -1)
    scales = np.abs(groups).max(axis=1) / np.float32(page_format.max_level)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > MIN_SCALE)
    levels = np.rint(groups * inverse[:, None]).astype(np.int16) + page_format.bias
    if page_format.bits == 8:
        return levels.reshape(-1).astype(page_format.dtype), scales
    half = INT4_GROUP_SIZE // 2
    low, high = levels[:, :half] & 15, levels[:, half:] & 15
    return (low | high << 4).astype(np.uint8).reshape(-1), scales


def unpack(stored: np.ndarray, page_format: PageFormat) -> Float32Array:
    """[..., elements] → what is stored as float32 [..., D], D padded, before its scales."""
    if page_format.bits == 4:
        packed = stored.reshape(*stored.shape[:-1], -1, INT4_GROUP_SIZE // 2)
        nibbles = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int16)
        levels = ((nibbles + 8 - page_format.bias) & 15) - 8
        return levels.reshape(*stored.shape[:-1], -1).astype(np.float32)
    return stored.astype(np.float32) - np.float32(page_format.bias)


def dequantize(stored: np.ndarray, scales: Float32Array, page_format: PageFormat) -> Float32Array:
    """[..., 16, elements] with scales [..., G, 16] → [..., 16, D] float32, D padded."""
    levels = unpack(stored, page_format)
    by_group = np.repeat(scales, levels.shape[-1] // scales.shape[-2], axis=-2)
    return levels * by_group.swapaxes(-1, -2)
