"""Paged attention over quantized pages: RoPE and page write, then softmax over what was written.

`NumpyAttention` is the reference, `attention_kernel.KernelAttention` the numba kernel; both have
the same method and one test runs both. Keys and values are always written to their page first and
read back from it, also inside a prefill chunk, and each query row is reduced in a fixed order (16
keys a vector, tiles of 128 keys, from position 0 up): a row's result does not depend on its batch.
The softmax is computed online over the tiles (Milakov & Gimelshein 2018; Dao et al. 2022).
Knows arrays only: no segments, no sequences' ids.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.architectures.config import ModelConfig
from engine.batch import Batch, Float32Array
from engine.kv_cache import LayerPages
from engine.kv_format import BLOCK_SIZE, MAX_MAGNITUDE, MIN_SCALE, KVFormat
from engine.simd import INT4_GROUP_SIZE

Attend = Callable[[Float32Array, LayerPages, Float32Array], None]


class Attention(Protocol):
    def begin(self, batch: Batch) -> Attend:
        """One step's attention: attend(qkv, pages, out) is then called for each layer.

        `qkv` [T, (H + 2 * KV) * D]: queries, keys and values of each token. Rotates queries and
        keys, writes keys and values to the batch's slots, then sets `out` [T, H * D] to each
        token's attention over its sequence up to and including itself. A key or value that is not
        finite makes NaN of every query that may see it, and of no other.
        """
        ...


def rope_table(head_size: int, theta: float, num_positions: int) -> tuple[Float32Array, ...]:
    """(cos, sin), each [num_positions, D / 2] float32 (Su et al. 2021), computed in float64."""
    frequencies = theta ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    angles = np.outer(np.arange(num_positions, dtype=np.float64), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class NumpyAttention:
    """Plain numpy, one token at a time: what the kernel must equal within rounding."""

    def __init__(self, config: ModelConfig, kv_format: KVFormat, max_model_len: int) -> None:
        self._config = config
        self._format = kv_format
        self._cos, self._sin = rope_table(config.head_size, config.rope_theta, max_model_len)

    def begin(self, batch: Batch) -> Attend:
        return partial(self._forward, batch)

    def _forward(
        self, batch: Batch, qkv: Float32Array, pages: LayerPages, out: Float32Array
    ) -> None:
        c = self._config
        heads = qkv.reshape(len(qkv), -1, c.head_size)
        scale = np.float32(1 / np.sqrt(c.head_size))
        queries = self._rotate(heads[:, : c.num_heads], batch) * scale
        keys = self._rotate(heads[:, c.num_heads : c.num_heads + c.num_kv_heads], batch)
        values = heads[:, c.num_heads + c.num_kv_heads :]
        for token, slot in enumerate(batch.slot_mapping):
            self._store(keys[token], values[token], pages, *divmod(int(slot), BLOCK_SIZE))
        self._attend(queries, batch, pages, out)

    def _rotate(self, x: Float32Array, batch: Batch) -> Float32Array:
        half = x.shape[-1] // 2
        cos, sin = self._cos[batch.positions][:, None], self._sin[batch.positions][:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def _store(
        self, key: Float32Array, value: Float32Array, pages: LayerPages, block: int, offset: int
    ) -> None:
        for head in range(len(key)):
            finite = bool(_is_finite(key[head]).all() and _is_finite(value[head]).all())
            stored, scales = quantize(key[head], self._format)
            pages.keys[block, head, :, offset] = stored
            pages.key_scales[block, head, :, offset] = scales if finite else np.nan
            stored, scales = quantize(value[head], self._format)
            pages.values[block, head, offset] = stored
            pages.value_scales[block, head, :, offset] = scales

    def _attend(
        self, queries: Float32Array, batch: Batch, pages: LayerPages, out: Float32Array
    ) -> None:
        for s in range(batch.num_sequences):
            first, last = int(batch.query_starts[s]), int(batch.query_starts[s + 1])
            length = int(batch.context_lens[s])
            blocks = batch.block_tables[s, : -(-length // BLOCK_SIZE)]
            keys, values = self._gather(pages, blocks)
            for token in range(first, last):
                visible = length - (last - 1 - token)
                out[token] = self._one(queries[token], keys[:, :visible], values[:, :visible])

    def _gather(self, pages: LayerPages, blocks: np.ndarray) -> tuple[Float32Array, Float32Array]:
        """Keys and values of the blocks' tokens, [KV, tokens, D] float32."""
        keys = dequantize(pages.keys[blocks].swapaxes(2, 3), pages.key_scales[blocks], self._format)
        values = dequantize(pages.values[blocks], pages.value_scales[blocks], self._format)
        shape = (self._config.num_kv_heads, -1, self._config.head_size)
        return keys.swapaxes(0, 1).reshape(shape), values.swapaxes(0, 1).reshape(shape)

    def _one(self, query: Float32Array, keys: Float32Array, values: Float32Array) -> Float32Array:
        c = self._config
        grouped = query.reshape(c.num_kv_heads, -1, c.head_size)  # [KV, G, D]
        scores = np.einsum("hgd,hkd->hgk", grouped, keys)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attended: Float32Array = np.einsum("hgk,hkd->hgd", weights, values)
        return attended.reshape(-1)


def _is_finite(x: Float32Array) -> NDArray[np.bool_]:
    finite: NDArray[np.bool_] = np.abs(x) < MAX_MAGNITUDE
    return finite


def quantize(x: Float32Array, kv_format: KVFormat) -> tuple[np.ndarray, Float32Array]:
    """One head's [D] as (stored elements, scales [G]); zeros where it is not finite."""
    x = np.where(_is_finite(x), x, np.float32(0))
    if kv_format.max_level == 0:
        return x, np.ones(1, np.float32)
    groups = x.reshape(kv_format.num_groups(len(x)), -1)
    scales = np.abs(groups).max(axis=1) / np.float32(kv_format.max_level)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > MIN_SCALE)
    levels = np.rint(groups * inverse[:, None])
    if kv_format.bits == 8:
        return levels.reshape(-1).astype(np.int8), scales
    half = INT4_GROUP_SIZE // 2
    nibbles = levels.astype(np.int16) + 8
    return (nibbles[:, :half] | nibbles[:, half:] << 4).astype(np.uint8).reshape(-1), scales


def dequantize(stored: np.ndarray, scales: Float32Array, kv_format: KVFormat) -> Float32Array:
    """[..., 16, elements] with scales [..., G, 16] → [..., 16, D] float32."""
    if kv_format.bits == 4:
        packed = stored.reshape(*stored.shape[:-1], scales.shape[-2], -1)
        levels = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float32) - 8
        values = levels * scales.swapaxes(-1, -2)[..., None]
        return values.reshape(*stored.shape[:-1], -1)
    return stored.astype(np.float32) * scales.swapaxes(-1, -2)
