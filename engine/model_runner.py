"""One step of the model: embedding, then segment, attention, segment, attention, …, head.

The tokens of all sequences travel together; which sequence a token belongs to matters to the
attention only. Knows no requests and draws no tokens.
"""

from __future__ import annotations

import numpy as np

from engine.attention import Attention
from engine.batch import Batch, Float32Array
from engine.embedding import Embedding
from engine.kv_cache import PagedKVCache
from engine.lane import Lane


class ModelRunner:
    """Owns the KV pages. Not thread-safe: one per loop thread."""

    def __init__(
        self, lane: Lane, attention: Attention, embedding: Embedding, cache: PagedKVCache
    ) -> None:
        self._lane = lane
        self._attention = attention
        self._embedding = embedding
        self._cache = cache

    def execute(self, batch: Batch) -> Float32Array:
        """Logits [R, V] float32 of `batch.logits_rows`, valid until the next call.

        Writes keys and values of all tokens to their slots. Raises DeviceError; the slots then
        hold garbage, and executing the batch again mends that.
        """
        lane = self._lane
        buffers = lane.begin(batch.num_tokens)
        self._embedding.lookup(batch.token_ids, buffers.hidden)
        attend = self._attention.begin(batch)
        for i, pages in enumerate(self._cache.layers):
            lane.run(i)
            attend(buffers.qkv, pages, buffers.attention)
        if len(batch.logits_rows) == 0:
            return np.empty((0, 0), np.float32)
        return lane.head(batch.logits_rows)
