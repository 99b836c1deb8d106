"""Drafts from a sequence's own words: where they pay, never wrong, gone with their sequence."""

from __future__ import annotations

import numpy as np
import pytest

from engine.speculation.step_costs import StepCosts
from scheduler.ngram_proposer import NgramProposer
from scheduler.sequence import Sequence
from tests.fakes import ScriptedRunner, expected_tokens, make_request, make_rig
from tests.scheduler.draft_fakes import FreeRows, repeating_next_token

pytestmark = pytest.mark.usefixtures("kernels")


def sequence_of(
    tokens: list[int], number: int = 0, max_tokens: int = 50, **more: object
) -> Sequence:
    request = make_request(f"r{number}", tokens, max_tokens, **more)  # type: ignore[arg-type]
    return Sequence(request, number, 0.0, 200)


def proposer(depth: int = 4, rows: int = 16, costs: StepCosts | None = None) -> NgramProposer:
    return NgramProposer(depth, rows, costs or FreeRows())


def test_it_proposes_what_followed_before() -> None:
    sequence = sequence_of([*range(10, 30), 7, *range(10, 18)])
    proposer().propose([sequence])
    assert sequence.draft_token_ids == [18, 19, 20, 21]


def test_each_sequence_is_looked_up_in_its_own_words() -> None:
    a, b = sequence_of([1, 2, 3, 4, 9, 1, 2], 0), sequence_of([1, 2, 5, 6, 9, 1, 2], 1)
    c = sequence_of([*range(20)], 2)
    proposer(2).propose([a, b, c])
    assert (a.draft_token_ids, b.draft_token_ids, c.draft_token_ids) == ([3, 4], [5, 6], [])


def test_a_predicted_output_is_proposed_from_the_start() -> None:
    sequence = sequence_of([1, 2, 3], predicted_token_ids=(40, 41, 42, 43, 44))
    mine = proposer()
    mine.propose([sequence])
    assert sequence.draft_token_ids == [40, 41, 42, 43]
    sequence.token_ids += [40, 41, 50]
    mine.propose([sequence])
    assert sequence.draft_token_ids == [43, 44], "it goes on behind a changed token"


def test_no_drafts_where_rows_cost_what_they_bring() -> None:
    sequence = sequence_of([4, 5, 6] * 20)
    proposer(costs=StepCosts(lambda sizes: np.asarray(sizes, np.float64))).propose([sequence])
    assert sequence.draft_token_ids == []


def test_the_rows_of_a_step_are_bounded() -> None:
    sequences = [sequence_of([4, 5, 6] * 20, number) for number in range(6)]
    proposer(rows=7).propose(sequences)
    assert sum(sequence.num_drafts for sequence in sequences) == 7


def test_a_new_sequence_with_an_old_number_starts_anew() -> None:
    mine = proposer()
    mine.propose([sequence_of([1, 2, 3, 4, 9, 1, 2])])
    fresh = sequence_of([*range(30, 40)])
    mine.propose([fresh])
    assert fresh.draft_token_ids == []


def test_finished_sequences_are_forgotten() -> None:
    mine = proposer()
    rig = make_rig(mine, ScriptedRunner(next_token=repeating_next_token))
    for number in range(60):
        rig.worker.add(make_request(f"r{number}", [1, 2, number], 4))
    rig.run()
    assert len(mine._followed) <= 2 * rig.scheduler.config.max_num_seqs + 8 + 4


def test_a_text_that_repeats_itself_takes_fewer_steps_and_says_the_same() -> None:
    def rig_with(mine: NgramProposer | None) -> object:
        runner = ScriptedRunner(next_token=repeating_next_token)
        rig = make_rig(mine, runner, max_model_len=128, num_blocks=64)
        rig.worker.add(make_request("r", [1, 2, 3], 100))
        rig.run()
        expected, _ = expected_tokens(make_request("x", [1, 2, 3], 100), 128, repeating_next_token)
        assert rig.tokens("r") == expected
        return rig.num_steps

    plain, drafted = rig_with(None), rig_with(proposer())
    assert isinstance(plain, int) and isinstance(drafted, int) and drafted < plain * 0.6


def test_counts_add_up_over_outputs_and_in_the_statistics() -> None:
    rig = make_rig(proposer(), ScriptedRunner(next_token=repeating_next_token))
    rig.worker.add(make_request("r", [1, 2, 3], 50))
    rig.run()
    outputs = rig.outputs["r"]
    for output in outputs:
        assert 0 <= output.num_accepted_tokens <= output.num_draft_tokens
        assert output.num_accepted_tokens <= len(output.new_token_ids)
    drafted = sum(output.num_draft_tokens for output in outputs)
    accepted = sum(output.num_accepted_tokens for output in outputs)
    assert accepted == 50 - len(outputs) > 10
    totals = rig.scheduler.totals
    assert (totals.draft_tokens, totals.accepted_tokens) == (drafted, accepted)
