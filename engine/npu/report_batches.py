"""Batches of any size for measuring whole steps. Pure: arrays of numbers, no model.

Sequences may share blocks, also within one: only the time counts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.batch import Batch, Int32Array
from engine.kv_format import BLOCK_SIZE


def decode_batch(num_sequences: int, context_len: int, num_blocks: int) -> Batch:
    """The newest token of so many sequences of that length."""
    width = -(-context_len // BLOCK_SIZE)
    tables = np.arange(num_sequences * width, dtype=np.int32).reshape(-1, width) % num_blocks
    positions = np.full(num_sequences, context_len - 1, np.int32)
    return Batch(
        token_ids=np.zeros(num_sequences, np.int32),
        positions=positions,
        slot_mapping=_slots(tables[:, -1], positions),
        query_starts=np.arange(num_sequences + 1, dtype=np.int32),
        context_lens=positions + np.int32(1),
        block_tables=tables.astype(np.int32),
        logits_rows=np.arange(num_sequences, dtype=np.int32),
    )


def prompt_batches(num_tokens: int, max_tokens: int, num_blocks: int) -> Iterator[Batch]:
    """A prompt in chunks; the last one's last token has logits."""
    table = np.arange(-(-num_tokens // BLOCK_SIZE), dtype=np.int32) % num_blocks
    for start in range(0, num_tokens, max_tokens):
        end = min(start + max_tokens, num_tokens)
        positions = np.arange(start, end, dtype=np.int32)
        rows = [end - start - 1] if end == num_tokens else []
        yield Batch(
            token_ids=np.zeros_like(positions),
            positions=positions,
            slot_mapping=_slots(table[positions // BLOCK_SIZE], positions),
            query_starts=np.array([0, end - start], np.int32),
            context_lens=np.array([end], np.int32),
            block_tables=table[None].astype(np.int32),
            logits_rows=np.array(rows, np.int32),
        )


def _slots(blocks: np.ndarray, positions: Int32Array) -> Int32Array:
    slots: Int32Array = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).astype(np.int32)
    return slots
