"""The flat batch of one step: what the runner reads, in arrays and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of S sequences, packed one sequence after another.

    `token_ids` [T], `positions` [T], `slot_mapping` [T] (block * block_size + offset, where the
    token's key and value go), `query_starts` [S + 1] (sequence s owns tokens
    query_starts[s]:query_starts[s + 1]), `context_lens` [S] (tokens with KV after this step),
    `block_tables` [S, B], `logits_rows` [R] (indices into the T tokens). All int32, C-contiguous.
    Usually views into buffers that the batch builder reuses: valid until the next step is built.
    """

    token_ids: Int32Array
    positions: Int32Array
    slot_mapping: Int32Array
    query_starts: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    logits_rows: Int32Array

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)
