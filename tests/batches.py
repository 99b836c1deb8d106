"""Batches for the engine's tests, written as what each sequence does in the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.batch import Batch, Int32Array
from engine.kv_format import BLOCK_SIZE


@dataclass(frozen=True)
class Span:
    """The tokens of one sequence in a step; `num_past` earlier ones are already in its pages."""

    token_ids: Sequence[int]
    table: Sequence[int]
    num_past: int = 0

    @property
    def positions(self) -> list[int]:
        return list(range(self.num_past, self.num_past + len(self.token_ids)))

    @property
    def slots(self) -> list[int]:
        size = BLOCK_SIZE
        return [
            self.table[position // size] * size + position % size for position in self.positions
        ]


def int32(values: object) -> Int32Array:
    return np.array(values, np.int32)


def make_batch(spans: Sequence[Span], unused_block: int = 0, rows: str = "all") -> Batch:
    """`rows`: logits of `all` tokens, of the `last` of each sequence, or `none`.

    What a table does not use points to `unused_block`.
    """
    starts = np.cumsum([0, *(len(span.token_ids) for span in spans)])
    width = max(len(span.table) for span in spans)
    tables = np.full((len(spans), width), unused_block, np.int32)
    for row, span in zip(tables, spans, strict=True):
        row[: len(span.table)] = span.table
    wanted = {"all": np.arange(starts[-1]), "last": starts[1:] - 1, "none": []}[rows]
    return Batch(
        token_ids=int32([token for span in spans for token in span.token_ids]),
        positions=int32([position for span in spans for position in span.positions]),
        slot_mapping=int32([slot for span in spans for slot in span.slots]),
        query_starts=int32(starts),
        context_lens=int32([span.num_past + len(span.token_ids) for span in spans]),
        block_tables=tables,
        logits_rows=int32(wanted),
    )
