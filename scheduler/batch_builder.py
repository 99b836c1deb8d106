"""A plan becomes the flat arrays that the runner reads. Knows slots; not policy, not devices.

All buffers are allocated once and reused: a `Batch` is valid until the next one is built. Rows of
the block tables are kept from step to step; as a table only grows at its end while a sequence
runs, usually nothing or one number has to be written.
"""

from __future__ import annotations

import numpy as np

from engine.batch import Batch, Int32Array
from scheduler.plan import Plan
from scheduler.policy import SchedulerConfig
from scheduler.sequence import Sequence


class BatchBuilder:
    """Buffers for `max_num_batched_tokens` tokens of `max_num_seqs` sequences."""

    def __init__(self, config: SchedulerConfig) -> None:
        size = config.block_size
        max_blocks = -(-config.max_model_len // size)
        self._block_size = size
        self._token_ids = _buffer(config.max_num_batched_tokens)
        self._positions = _buffer(config.max_num_batched_tokens)
        self._slots = _buffer(config.max_num_batched_tokens)
        self._query_starts = _buffer(config.max_num_seqs + 1)
        self._context_lens = _buffer(config.max_num_seqs)
        self._logits_rows = _buffer(config.num_logits_rows)
        self._block_tables = np.zeros((config.max_num_seqs, max_blocks), np.int32)
        self._copied_tables: list[list[int]] = [[] for _ in range(config.max_num_seqs)]
        self._copied_lens = [0] * config.max_num_seqs
        positions = np.arange(max_blocks * size, dtype=np.int32)
        self._position_range = positions
        self._block_indices = positions // size
        self._offsets = positions % size

    def build(self, plan: Plan) -> Batch:
        query_starts, context_lens = self._query_starts, self._context_lens
        num_tokens = num_rows = 0
        for index, sequence in enumerate(plan.sequences):
            num_new = plan.num_tokens[index]
            num_computed = sequence.num_computed_tokens
            self._copy_table(index, sequence.block_table)
            if num_new == 1:
                self._write_token(num_tokens, sequence, num_computed)
            else:
                self._write_chunk(index, num_tokens, sequence, num_new)
            num_rows = self._write_rows(plan, index, num_tokens, num_rows)
            num_tokens += num_new
            query_starts[index + 1] = num_tokens
            context_lens[index] = num_computed + num_new
        num_sequences = len(plan.sequences)
        return Batch(
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            slot_mapping=self._slots[:num_tokens],
            query_starts=query_starts[: num_sequences + 1],
            context_lens=context_lens[:num_sequences],
            block_tables=self._block_tables[:num_sequences],
            logits_rows=self._logits_rows[:num_rows],
        )

    def _copy_table(self, index: int, table: list[int]) -> None:
        """Freed tables are replaced, so the same list object has the same numbers in front."""
        num_copied = self._copied_lens[index] if self._copied_tables[index] is table else 0
        if num_copied != len(table):
            self._block_tables[index, num_copied : len(table)] = table[num_copied:]
            self._copied_tables[index] = table
            self._copied_lens[index] = len(table)

    def _write_token(self, at: int, sequence: Sequence, position: int) -> None:
        size = self._block_size
        self._token_ids[at] = sequence.token_ids[position]
        self._positions[at] = position
        self._slots[at] = sequence.block_table[position // size] * size + position % size

    def _write_chunk(self, index: int, at: int, sequence: Sequence, num_new: int) -> None:
        start = sequence.num_computed_tokens
        end, until = start + num_new, at + num_new
        tokens = sequence.token_ids[start:end]
        if len(tokens) < num_new:
            tokens += sequence.draft_token_ids[: num_new - len(tokens)]
        self._token_ids[at:until] = tokens
        self._positions[at:until] = self._position_range[start:end]
        slots = self._slots[at:until]
        # "clip" only because "raise" makes numpy buffer the output; the indices are in range.
        row = self._block_tables[index]
        np.take(row, self._block_indices[start:end], out=slots, mode="clip")
        slots *= self._block_size
        slots += self._offsets[start:end]

    def _write_rows(self, plan: Plan, index: int, at: int, num_rows: int) -> int:
        """The prompt rows are the chunk's first, the sample rows its last."""
        num_sample = plan.num_sample_rows[index]
        num_prompt = plan.num_prompt_rows[index]
        end = at + plan.num_tokens[index]
        if num_sample == 1 and num_prompt == 0:
            self._logits_rows[num_rows] = end - 1
            return num_rows + 1
        for row in (*range(at, at + num_prompt), *range(end - num_sample, end)):
            self._logits_rows[num_rows] = row
            num_rows += 1
        return num_rows


def _buffer(size: int) -> Int32Array:
    return np.zeros(size, np.int32)
