"""Rows of keys and values into pages and out of them, for a lane whose graphs do the attention.

Writing is the attention kernel's own, so pages are the same whoever filled them. Knows no devices.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.architectures.config import ModelConfig
from engine.batch import Float32Array, Int32Array
from engine.kernels.attention_kernel import (
    layer_arguments,
    make_scratch,
    query_size,
    run_part,
)
from engine.kernels.attention_tiles import AttentionTiles
from engine.kernels.gather_kernel import gather_window
from engine.kernels.thread_team import COUNTER_BYTES
from engine.kv_cache import LayerPages
from engine.kv_format import KVFormat

_NO_TILES = AttentionTiles(0, 0, 0)


class PageRows:
    """Not thread-safe: it has scratch memory."""

    def __init__(self, config: ModelConfig, kv_format: KVFormat, max_model_len: int) -> None:
        padded_size = kv_format.padded_size(config.head_size)
        self._layers = layer_arguments(config, max_model_len)
        self._levels = (kv_format.keys.max_level, kv_format.values.max_level, config.head_size)
        self._forms = tuple((part.bits, part.bias) for part in (kv_format.keys, kv_format.values))
        # A group of no query heads: there are no queries in the rows.
        num_bytes = query_size(kv_format, padded_size)
        self._no_queries = np.zeros((config.num_kv_heads, 1, 0, num_bytes), np.uint8)
        self._scratch = make_scratch(kv_format, padded_size, 1, 0, 0)
        self._counters = np.zeros(COUNTER_BYTES // 8, np.int64)
        self._nothing = np.zeros(0, np.int32)

    def write(
        self, rows: Float32Array, positions: Int32Array, slots: Int32Array, pages: LayerPages
    ) -> None:
        """Rotates the keys of `rows` [T, 2 * KV * D] (keys, then values) and writes both."""
        nothing = self._nothing
        run_part(
            0, 1, True, False, _NO_TILES, *self._levels, positions, slots, nothing, nothing,
            nothing.reshape(0, 0), self._no_queries, self._scratch, self._counters,
            *self._layers[pages.layer], rows, *pages.arrays, rows,
        )  # fmt: skip

    def gather(
        self,
        tables: Int32Array,
        num_past: Int32Array,
        pages: LayerPages,
        keys: Float32Array,
        values: Float32Array,
    ) -> NDArray[np.bool_]:
        """The sequences' first tokens into `keys` [KV, D, W] and `values` [KV, W, D].

        `tables` [S, B] and `num_past` [S] say which. Returns [S]: whether a key or value of the
        sequence is not finite; such tokens become zeros.
        """
        is_lost = np.zeros(len(num_past), np.bool_)
        gather_window(tables, num_past, *self._forms, *pages.arrays, keys, values, is_lost)
        return is_lost
