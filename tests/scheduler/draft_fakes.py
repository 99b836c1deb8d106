"""A small model that guesses what the scripted one will say, and costs that never forbid it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.batch import Batch, Float32Array
from engine.sampler import SampleRow
from engine.speculation.draft_model import DraftModel
from engine.speculation.step_costs import StepCosts
from tests.fakes import VOCAB_SIZE, FakeSampler, NextToken, ScriptedRunner, chain


class FreeRows(StepCosts):
    """Rows cost nothing, whatever is measured: drafts are made wherever a chance is seen."""

    def __init__(self) -> None:
        super().__init__(lambda sizes: np.ones(len(sizes)))

    def observe(self, num_tokens: int, seconds: float) -> None:
        pass


def repeating_next_token(token_ids: tuple[int, ...]) -> int:
    """A text that soon repeats itself: mostly a function of the two newest tokens."""
    a, b = (0, *token_ids)[-2:]
    is_odd = chain(9, len(token_ids), b) % 13 == 0
    return (chain(a + 1, b, 3) >> 40) % 11 + is_odd


def half_right(next_token: NextToken, odds: int = 4) -> NextToken:
    """Guesses wrong once in `odds` times."""

    def guess(token_ids: tuple[int, ...]) -> int:
        is_wrong = chain(5, len(token_ids), sum(token_ids[-3:])) % odds == 0
        return (next_token(token_ids) + is_wrong) % VOCAB_SIZE

    return guess


class CountingRunner:
    def __init__(self, runner: ScriptedRunner) -> None:
        self.runner = runner
        self.num_tokens = 0

    def execute(self, batch: Batch) -> Float32Array:
        self.num_tokens += batch.num_tokens
        return self.runner.execute(batch)


class FakeDraftModel(DraftModel):
    """The real batches over a scripted runner, whose pages notice a key that is not there."""

    def __init__(self, runner: ScriptedRunner, max_tokens: int = 32, block_size: int = 4) -> None:
        runner.block_size = block_size
        self.counting = CountingRunner(runner)
        self.scripted = runner
        super().__init__(self.counting, VOCAB_SIZE, max_tokens, block_size)

    def choose(self, logits: Float32Array, rows: Sequence[SampleRow]) -> list[int | None]:
        return [sampled.token_id for sampled in FakeSampler().sample(logits, list(rows))]
