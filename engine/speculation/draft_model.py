"""A second, smaller model that guesses what the first will say.

It has pages of its own with as many blocks of the same size, so the sequences' block tables index
both. What its pages hold is its user's business (`scheduler/draft_proposer.py`): stale ones cost
acceptance, never correctness. Knows arrays only; not why a sequence is drafted for, or how far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.batch import Batch, Float32Array
from engine.kernels.sampling_kernel import draw_draft, make_scratch
from engine.kv_format import BLOCK_SIZE
from engine.sampler import DrawnDraft, Sampler, SampleRow
from engine.sampling_params import SamplingParams

MAX_DRAWN_FROM = 64
"""A random draft comes from so many of the draft model's most likely tokens. Lossless with any."""

_SEED_MASK = (1 << 64) - 1


class DraftRunner(Protocol):
    def execute(self, batch: Batch) -> Float32Array:
        """As `StepForm.execute`."""
        ...


@dataclass(frozen=True, slots=True)
class DraftSpan:
    """Tokens of one sequence to compute: the first is at position `start`, `table` its blocks."""

    token_ids: Sequence[int]
    start: int
    table: Sequence[int]


class DraftModel:
    """Not thread-safe: one per loop thread. `vocab_size`: of the tokens that both models know."""

    def __init__(
        self, runner: DraftRunner, vocab_size: int, max_tokens: int, block_size: int = BLOCK_SIZE
    ) -> None:
        self.max_tokens = max_tokens
        self.block_size = block_size
        self._runner = runner
        self._vocab_size = vocab_size
        self._sampler = Sampler(vocab_size)
        self._scratch = make_scratch(vocab_size)

    def execute(self, spans: Sequence[DraftSpan]) -> Float32Array:
        """Logits [S, V] behind the last token of each span. At most `max_tokens` tokens in all.

        Raises DeviceError.
        """
        logits = self._runner.execute(_batch(spans, self.block_size))
        return np.ascontiguousarray(logits[:, : self._vocab_size])

    def choose(self, logits: Float32Array, rows: Sequence[SampleRow]) -> list[int | None]:
        """What each row would draw if these were the logits of the model itself: the same most
        likely token, or the same number of (seed, position) turned into a token."""
        return [sampled.token_id for sampled in self._sampler.sample(logits, rows)]

    def draw(
        self, logits: Float32Array, params: SamplingParams, position: int
    ) -> DrawnDraft | None:
        """A random draft from one row [V], to be verified by rejection sampling; None for NaN."""
        limit = min(params.top_k or MAX_DRAWN_FROM, MAX_DRAWN_FROM, self._vocab_size)
        ids = np.empty(self._vocab_size, np.int32)
        probabilities = np.empty(self._vocab_size, np.float32)
        token, count = draw_draft(
            logits, params.temperature, limit, params.top_p, params.min_p,
            np.uint64(params.seed & _SEED_MASK), position, self._scratch, ids, probabilities,
        )  # fmt: skip
        if token < 0:
            return None
        return DrawnDraft(int(token), ids[:count].copy(), probabilities[:count].copy())

    def warm_up(self) -> None:
        """Runs every compiled function once. Leaves garbage in block 0 only."""
        logits = self.execute([DraftSpan([0], 0, [0])])
        params = SamplingParams(max_tokens=1, is_seeded=False)
        draft = self.draw(logits[0], params, 1)
        self.choose(logits, [SampleRow(0, 1, params, [0], 1, None, draft)])


def _batch(spans: Sequence[DraftSpan], block_size: int) -> Batch:
    lengths = [len(span.token_ids) for span in spans]
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    tables = np.zeros((len(spans), max(len(span.table) for span in spans)), np.int32)
    for row, span in zip(tables, spans, strict=True):
        row[: len(span.table)] = span.table
    positions = np.concatenate(
        [np.arange(span.start, span.start + len(span.token_ids)) for span in spans]
    ).astype(np.int32)
    owners = np.repeat(np.arange(len(spans)), lengths)
    slots = tables[owners, positions // block_size] * block_size + positions % block_size
    return Batch(
        token_ids=np.array([token for span in spans for token in span.token_ids], np.int32),
        positions=positions,
        slot_mapping=slots.astype(np.int32),
        query_starts=starts,
        context_lens=np.array([s.start + len(s.token_ids) for s in spans], np.int32),
        block_tables=tables,
        logits_rows=starts[1:] - 1,
    )
