"""Speculation under faults of both models, preemption, cancels and shared prefixes.

Everybody still gets the text of being alone, and no block is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.draft_proposer import DraftModelProposer
from scheduler.ngram_proposer import NgramProposer
from scheduler.proposers import Chain
from scheduler.worker import ModelWorker, Proposer
from tests.fakes import FakeSampler, Rig, ScriptedRunner, make_rig
from tests.scheduler.draft_fakes import (
    FakeDraftModel,
    FreeRows,
    half_right,
    repeating_next_token,
)
from tests.scheduler.test_step_fuzz import (
    BLOCK,
    Scenario,
    check_logprobs,
    check_text,
    play_on,
    scenarios,
)

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Faults are injected by the hundred."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def rig_for(scenario: Scenario, method: str, draft_faults: set[int]) -> tuple[Rig, FakeDraftModel]:
    runner = ScriptedRunner(
        next_token=repeating_next_token,
        raise_at={n: RuntimeError("injected") for n in scenario.faults},
    )
    rig = make_rig(None, runner, **scenario.overrides)
    guess = ScriptedRunner(
        next_token=half_right(repeating_next_token),
        raise_at={n: RuntimeError("injected") for n in draft_faults},
        nan_at={n + 1 for n in draft_faults},
    )
    model = FakeDraftModel(guess, max_tokens=12, block_size=BLOCK)
    config = rig.scheduler.config
    num_rows, depth = config.num_logits_rows - config.max_num_seqs, 1 + scenario.max_drafts
    ngram = NgramProposer(depth, num_rows, FreeRows())
    draft = DraftModelProposer(model, rig.scheduler.kv, depth, num_rows, FreeRows())
    methods: dict[str, Proposer] = {"ngram": ngram, "draft": draft, "auto": Chain(ngram, draft)}
    rig.worker = ModelWorker(rig.scheduler, runner, FakeSampler(), methods[method])
    return rig, model


@settings(max_examples=150, deadline=None)
@given(
    scenarios(repeating_next_token),
    st.sampled_from(["ngram", "draft", "auto"]),
    st.sets(st.integers(0, 60), max_size=4),
)
def test_drafts_change_no_token_whatever_happens(
    scenario: Scenario, method: str, draft_faults: set[int]
) -> None:
    rig, model = rig_for(scenario, method, draft_faults)
    play_on(rig, scenario)
    for visit in scenario.visits:
        outputs = rig.outputs[visit.request.request_id]
        check_text(scenario, visit, outputs, repeating_next_token)
        check_logprobs(visit.request, outputs, repeating_next_token)
    assert model.scripted.violations == []
    assert rig.scheduler.kv.num_free_blocks == rig.scheduler.config.num_blocks
    assert rig.scheduler.check_invariants() == []
