"""Drafts from a second model: pages kept right, failures harmless, lengths by what drafts bring."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from engine.sampling_params import SamplingParams
from engine.speculation.step_costs import StepCosts
from scheduler.draft_proposer import DraftModelProposer
from scheduler.kv_manager import KVManager
from scheduler.messages import GenerationRequest, Priority
from scheduler.sequence import Sequence
from scheduler.worker import MAX_FAILED_PROPOSALS, ModelWorker
from tests.fakes import (
    FakeSampler,
    NextToken,
    Rig,
    ScriptedRunner,
    expected_tokens,
    hashed_next_token,
    make_request,
    make_rig,
)
from tests.scheduler.draft_fakes import FakeDraftModel, FreeRows, half_right

pytestmark = pytest.mark.usefixtures("kernels")


def rig_with(
    guess: NextToken,
    depth: int = 4,
    costs: StepCosts | None = None,
    max_tokens: int = 32,
    **overrides: Any,
) -> tuple[Rig, FakeDraftModel]:
    rig = make_rig(**overrides)
    model = FakeDraftModel(ScriptedRunner(next_token=guess), max_tokens)
    mine = DraftModelProposer(model, rig.scheduler.kv, depth, 12, costs or FreeRows())
    rig.worker = ModelWorker(rig.scheduler, rig.runner, FakeSampler(), mine)
    return rig, model


def check(rig: Rig, model: FakeDraftModel, *requests: GenerationRequest) -> None:
    for request in requests:
        assert rig.tokens(request.request_id) == expected_tokens(request, 64)[0]
    assert model.scripted.violations == []
    assert rig.scheduler.kv.num_free_blocks == rig.scheduler.config.num_blocks


def run_one(rig: Rig, request: GenerationRequest) -> GenerationRequest:
    rig.worker.add(request)
    rig.run()
    return request


def test_a_perfect_model_makes_steps_rare() -> None:
    rig, model = rig_with(hashed_next_token)
    check(rig, model, run_one(rig, make_request("r", [1, 2, 3], 50)))
    assert rig.num_steps <= 1 + 50 // 5 + 2
    totals = rig.scheduler.totals
    assert totals.accepted_tokens == totals.draft_tokens > 30


@pytest.mark.parametrize("odds", [2, 3, 6])
def test_a_model_that_errs_changes_no_token(odds: int) -> None:
    rig, model = rig_with(half_right(hashed_next_token, odds))
    requests = [make_request(f"r{i}", [i, 2, 3, i], 30) for i in range(3)]
    requests.append(
        make_request("seeded", [7], sampling=SamplingParams(max_tokens=20, temperature=1.0, seed=3))
    )
    for request in requests:
        rig.worker.add(request)
    rig.run()
    check(rig, model, *requests)
    assert rig.scheduler.totals.accepted_tokens > 10


def test_seeded_drafts_are_drawn_as_the_model_itself_would() -> None:
    """A perfect draft model with the same (seed, position) is never refused."""
    rig, model = rig_with(hashed_next_token)
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=11)
    check(rig, model, run_one(rig, make_request("r", [1, 2], sampling=sampling)))
    assert rig.scheduler.totals.accepted_tokens == rig.scheduler.totals.draft_tokens > 25


def test_a_model_that_is_always_wrong_is_soon_asked_no_more() -> None:
    def wrong(token_ids: tuple[int, ...]) -> int:
        return (hashed_next_token(token_ids) + 1) % 64

    costs = StepCosts()
    rig, model = rig_with(wrong, costs=costs)
    check(rig, model, run_one(rig, make_request("r", [1, 2], 60)))
    assert rig.scheduler.totals.draft_tokens < 30
    assert rig.scheduler.totals.accepted_tokens == 0


def test_a_long_prompt_is_caught_up_with_in_pieces_and_then_drafted_for() -> None:
    rig, model = rig_with(hashed_next_token, max_tokens=12)
    check(rig, model, run_one(rig, make_request("r", [*range(40)], 20)))
    assert max(model.scripted.batch_sizes) <= 12
    assert rig.scheduler.totals.accepted_tokens > 8


def test_drafts_of_the_last_step_are_not_computed_twice() -> None:
    rig, model = rig_with(hashed_next_token)
    check(rig, model, run_one(rig, make_request("r", [1, 2, 3], 50)))
    assert model.counting.num_tokens <= 3 + 50 + 4


def test_a_prefix_that_was_drafted_with_is_not_computed_again() -> None:
    rig, model = rig_with(hashed_next_token)
    first = run_one(rig, make_request("a", [*range(20)], 10))
    num_first = model.counting.num_tokens
    second = run_one(rig, make_request("b", [*range(16), 40, 41], 10))
    check(rig, model, first, second)
    assert model.counting.num_tokens - num_first <= 2 + 10 + 4


def test_a_prefix_that_was_not_drafted_with_is_computed() -> None:
    """The prompt alone leaves no drafts behind; its blocks are hits for the model only."""
    rig, model = rig_with(hashed_next_token)
    first = run_one(rig, make_request("a", [*range(20)], 1))
    second = run_one(rig, make_request("b", [*range(16), 40, 41], 10))
    check(rig, model, first, second)
    assert model.counting.num_tokens >= 18


def test_preempted_sequences_are_drafted_for_again() -> None:
    rig, model = rig_with(half_right(hashed_next_token), num_blocks=12, max_num_seqs=2)
    low = [make_request(f"low{i}", [i, *range(10)], 20, Priority.LOW) for i in range(2)]
    for request in low:
        rig.worker.add(request)
    for _ in range(4):
        rig.step()
    high = make_request("high", [*range(30, 50)], 10, Priority.HIGH)
    rig.worker.add(high)
    rig.run()
    assert rig.scheduler.totals.preemptions > 0
    check(rig, model, *low, high)


def test_drafting_takes_no_block_that_others_need() -> None:
    rig, model = rig_with(hashed_next_token, num_blocks=9, max_logits_rows=12)
    requests = [make_request(f"r{i}", [i], 8) for i in range(4)]
    for request in requests:
        rig.worker.add(request)
    rig.run()
    check(rig, model, *requests)
    assert rig.scheduler.totals.preemptions == 0


def test_a_draft_model_that_fails_costs_only_its_drafts(caplog: pytest.LogCaptureFixture) -> None:
    rig, model = rig_with(hashed_next_token)
    model.scripted.raise_at = {n: RuntimeError("lost") for n in (1, 2, 5)}
    with caplog.at_level(logging.CRITICAL):
        check(rig, model, run_one(rig, make_request("r", [1, 2, 3], 40)))
    assert rig.scheduler.totals.accepted_tokens > 15
    assert rig.scheduler.totals.failed_steps == 0


def test_a_draft_model_that_always_fails_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    rig, model = rig_with(hashed_next_token)
    model.scripted.raise_at = {n: RuntimeError("gone") for n in range(1000)}
    with caplog.at_level(logging.CRITICAL):
        check(rig, model, run_one(rig, make_request("r", [1, 2, 3], 40)))
    assert model.scripted.num_executed == MAX_FAILED_PROPOSALS


def test_a_nan_of_the_draft_model_ends_the_drafts_there() -> None:
    rig, model = rig_with(hashed_next_token)
    model.scripted.nan_at = {0, 2, 3}
    check(rig, model, run_one(rig, make_request("r", [1, 2, 3], 40)))
    assert rig.scheduler.totals.accepted_tokens > 10


def test_random_drafts_come_with_what_they_were_drawn_from() -> None:
    kv = KVManager(32, 4, True)
    model = FakeDraftModel(ScriptedRunner(next_token=hashed_next_token))
    mine = DraftModelProposer(model, kv, 3, 12, FreeRows())

    def sequence_of(number: int, **sampling: object) -> Sequence:
        params = SamplingParams(max_tokens=30, **sampling)  # type: ignore[arg-type]
        sequence = Sequence(make_request("r", [1, 2, 3], sampling=params), number, 0.0, 64)
        assert kv.reserve(sequence, 3)
        return sequence

    unseeded = sequence_of(0, temperature=1.0, is_seeded=False)
    seeded = sequence_of(1, temperature=1.0)
    greedy = sequence_of(2, temperature=0.0, is_seeded=False)
    mine.propose([unseeded, seeded, greedy])
    assert [s.num_drafts for s in (unseeded, seeded, greedy)] == [2, 2, 2]
    assert [len(s.drawn_drafts) for s in (unseeded, seeded, greedy)] == [2, 0, 0]
    for token_id, drawn in zip(unseeded.draft_token_ids, unseeded.drawn_drafts, strict=True):
        assert drawn.token_id == token_id and token_id in drawn.ids
        assert np.isclose(drawn.probabilities.sum(), 1) and (np.diff(drawn.ids) > 0).all()
