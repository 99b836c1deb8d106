"""Unseeded answers with a draft model: whole answers are as likely as the model says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from engine.batch import Batch, Float32Array
from engine.grammar import UNCONSTRAINED, Grammar, TokenMask
from engine.kv_format import BLOCK_SIZE
from engine.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.speculation.draft_model import DraftModel
from scheduler.draft_proposer import DraftModelProposer
from scheduler.messages import GenerationRequest
from scheduler.policy import SchedulerConfig
from scheduler.scheduler import Scheduler
from scheduler.worker import ModelWorker
from tests.engine.test_sampling_kernel import assert_chi_square
from tests.scheduler.draft_fakes import FreeRows

pytestmark = pytest.mark.usefixtures("kernels")

VOCAB, LENGTH, NUM_ANSWERS = 4, 4, 3000


class MarkovRunner:
    """Logits are a function of the token itself: [VOCAB, VOCAB]."""

    def __init__(self, logits: Float32Array) -> None:
        self._logits = logits

    def execute(self, batch: Batch) -> Float32Array:
        return self._logits[batch.token_ids[batch.logits_rows]]


class Without:
    """A grammar in which one token never comes."""

    is_terminated = False

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def masks(self, draft_token_ids: Sequence[int]) -> Sequence[TokenMask]:
        allowed = sum(1 << token_id for token_id in range(VOCAB) if token_id != self._token_id)
        return [np.array([allowed], np.int32)] * (1 + len(draft_token_ids))

    def accept(self, token_ids: Sequence[int]) -> int:
        assert self._token_id not in token_ids
        return len(token_ids)

    def num_allowed(self, draft_token_ids: Sequence[int]) -> int:
        drafts = list(draft_token_ids)
        return drafts.index(self._token_id) if self._token_id in drafts else len(drafts)


class Grammars:
    """The text of a grammar is the id of the token that may not come."""

    def create(self, text: str) -> Grammar:
        return Without(int(text)) if text else UNCONSTRAINED


def answers(
    model: Float32Array, guess: Float32Array, grammar: str = ""
) -> tuple[dict[tuple[int, ...], int], float]:
    """How often each answer came, and how many of the drafts stood."""
    config = SchedulerConfig(
        max_model_len=64, num_blocks=64, max_num_seqs=8, max_logits_rows=48,
        max_num_batched_tokens=256, enable_prefix_caching=False,
    )  # fmt: skip
    scheduler = Scheduler(config, grammars=Grammars())
    draft_model = DraftModel(MarkovRunner(guess), VOCAB, 128, BLOCK_SIZE)
    proposer = DraftModelProposer(draft_model, scheduler.kv, 3, 40, FreeRows())
    worker = ModelWorker(scheduler, MarkovRunner(model), Sampler(VOCAB), proposer)
    replies: dict[str, list[int]] = {}
    for seed in range(NUM_ANSWERS):
        params = SamplingParams(max_tokens=LENGTH, seed=seed, is_seeded=False)
        worker.add(GenerationRequest(f"r{seed}", (0,), params, grammar=grammar))
        replies[f"r{seed}"] = []
    while worker.has_work:
        for output in worker.step().outputs:
            replies[output.request_id] += output.new_token_ids
    counts: dict[tuple[int, ...], int] = {}
    for tokens in replies.values():
        counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
    totals = scheduler.totals
    assert totals.draft_tokens > NUM_ANSWERS / 2
    return counts, totals.accepted_tokens / totals.draft_tokens


@pytest.mark.parametrize("spread", [0.3, 2.0])
@pytest.mark.parametrize("forbidden", [None, 1])
def test_whole_answers_follow_the_models_distribution(spread: float, forbidden: int | None) -> None:
    rng = np.random.default_rng(2)
    model = rng.standard_normal((VOCAB, VOCAB)).astype(np.float32)
    guess = model + spread * rng.standard_normal((VOCAB, VOCAB)).astype(np.float32)
    if forbidden is not None:
        guess[:, forbidden] += 1.5
    counts, share = answers(model, guess, "" if forbidden is None else str(forbidden))
    chances = np.exp(model.astype(np.float64))
    if forbidden is not None:
        chances[:, forbidden] = 0
    chances /= chances.sum(axis=1, keepdims=True)
    every = list(itertools.product(range(VOCAB), repeat=LENGTH))
    expected = [
        np.prod([chances[a, b] for a, b in itertools.pairwise((0, *each))]) for each in every
    ]
    observed = np.array([counts.get(each, 0) for each in every])
    assert_chi_square(observed, NUM_ANSWERS * np.array(expected))
    assert 0.15 < share < 1
