"""Grammars in the scheduler: masked rows, accepted in commit, an end, a replay, and failures.

The grammar here is a list of tokens that the output must consist of, so every mask has one bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from engine.grammar import UNCONSTRAINED, Grammar, GrammarError, TokenMask
from scheduler.messages import FinishReason, GenerationRequest, Priority
from scheduler.sequence import Sequence as SchedulerSequence
from tests.fakes import VOCAB_SIZE, Rig, expected_tokens, greedy, make_request, make_rig

END = 63


@dataclass
class Recital:
    """Allows `tokens` in their order and then `END`. Fails where `tokens` holds a negative one."""

    tokens: list[int]
    num_said: int = 0

    @property
    def is_terminated(self) -> bool:
        return self.num_said >= len(self.tokens)

    def masks(self, draft_token_ids: Sequence[int]) -> Sequence[TokenMask | None]:
        num_right = self.num_allowed(draft_token_ids)
        masks: list[TokenMask | None] = [None] * (1 + len(draft_token_ids))
        for index in range(min(num_right, len(draft_token_ids)) + 1):
            masks[index] = self._mask(self.num_said + index)
        return masks

    def accept(self, token_ids: Sequence[int]) -> int:
        for count, token_id in enumerate(token_ids, start=1):
            if token_id != self._next(self.num_said):
                raise GrammarError(f"token {token_id} may not come")
            self.num_said += 1
            if self.is_terminated:
                return count
        return len(token_ids)

    def num_allowed(self, draft_token_ids: Sequence[int]) -> int:
        for index, token_id in enumerate(draft_token_ids):
            if token_id != self._next(self.num_said + index):
                return index
        return len(draft_token_ids)

    def _mask(self, at: int) -> TokenMask:
        if self._next(at) < 0:
            raise GrammarError("the text is lost")
        bits = np.zeros(VOCAB_SIZE, np.uint8)
        bits[self._next(at)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _next(self, at: int) -> int:
        return self.tokens[at] if at < len(self.tokens) else END


@dataclass
class Recitals:
    """ "5 6 7" is the grammar of these three tokens."""

    created: list[Recital] = field(default_factory=list)

    def create(self, text: str) -> Grammar:
        if not text:
            return UNCONSTRAINED
        if text == "bad":
            raise GrammarError("the grammar is bad")
        self.created.append(Recital([int(word) for word in text.split()]))
        return self.created[-1]


@dataclass
class FixedDrafts:
    """Proposes, after `n` tokens of output, `drafts[n:n + length]`."""

    drafts: list[int]
    length: int
    num_proposed: int = 0

    def propose(self, sequences: list[SchedulerSequence]) -> None:
        for sequence in sequences:
            at = sequence.num_output_tokens
            room = sequence.max_num_tokens - sequence.num_tokens - 1
            sequence.draft_token_ids = self.drafts[at : at + min(self.length, room)]
            self.num_proposed += len(sequence.draft_token_ids)


def rig_for(
    *requests: GenerationRequest, proposer: FixedDrafts | None = None, **changes: Any
) -> Rig:
    rig = make_rig(proposer, grammars=Recitals(), **changes)
    for request in requests:
        rig.worker.add(request)
    return rig


def recite(
    text: str, name: str = "r", max_tokens: int = 20, min_tokens: int = 0, **changes: Any
) -> GenerationRequest:
    sampling = greedy(max_tokens, stop_token_ids=(END,), min_tokens=min_tokens)
    return make_request(name, sampling=sampling, grammar=text, **changes)


def test_a_sequence_says_what_its_grammar_allows_and_stops_when_that_is_complete() -> None:
    rig = rig_for(recite("5 6 7"))
    rig.run()
    assert rig.tokens("r") == [5, 6, 7]
    last = rig.outputs["r"][-1]
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, None)


def test_a_complete_output_stops_also_exactly_at_the_budget_and_a_cut_one_does_not() -> None:
    rig = rig_for(recite("5 6 7", "whole", 3), recite("5 6 7", "cut", 2))
    rig.run()
    assert (rig.tokens("whole"), rig.reason("whole")) == ([5, 6, 7], FinishReason.STOP)
    assert (rig.tokens("cut"), rig.reason("cut")) == ([5, 6], FinishReason.LENGTH)


def test_a_complete_output_ends_before_min_tokens() -> None:
    rig = rig_for(recite("5 6", min_tokens=10))
    rig.run()
    assert (rig.tokens("r"), rig.reason("r")) == ([5, 6], FinishReason.STOP)


def test_an_end_token_that_completes_the_output_is_told_as_one() -> None:
    rig = rig_for(recite(f"5 {END}"))
    rig.run()
    last = rig.outputs["r"][-1]
    assert (rig.tokens("r"), last.stop_token_id) == ([5, END], END)


def test_others_in_the_batch_do_not_notice() -> None:
    free = [make_request(f"free{i}", [i + 1, 2, 3], 6) for i in range(2)]
    rig = rig_for(free[0], recite("9 8 7 6"), free[1])
    rig.run()
    assert rig.tokens("r") == [9, 8, 7, 6]
    for request in free:
        assert rig.tokens(request.request_id) == expected_tokens(request, 64)[0]


def test_a_resumed_sequence_goes_on_where_its_output_was() -> None:
    rig = rig_for(recite("5 6 7 8", resumed_token_ids=(5, 6)))
    rig.run()
    assert (rig.tokens("r"), rig.reason("r")) == ([7, 8], FinishReason.STOP)


def test_a_resumed_sequence_whose_output_does_not_fit_is_refused() -> None:
    rig = rig_for(recite("5 6 7 8", resumed_token_ids=(5, 9)))
    rig.run()
    assert rig.reason("r") is FinishReason.ERROR
    assert rig.outputs["r"][-1].error == "token 9 may not come"


def test_a_resumed_sequence_whose_output_goes_beyond_the_end_is_refused() -> None:
    rig = rig_for(recite("5 6", resumed_token_ids=(5, 6, 7)))
    rig.run()
    assert "beyond the end" in str(rig.outputs["r"][-1].error)


def test_a_grammar_that_cannot_be_made_refuses_its_request_only() -> None:
    free = make_request("free")
    rig = rig_for(recite("bad"), free)
    rig.run()
    assert (rig.reason("r"), rig.outputs["r"][-1].error) == (
        FinishReason.ERROR,
        "the grammar is bad",
    )
    assert rig.tokens("free") == expected_tokens(free, 64)[0]


def test_a_grammar_that_fails_ends_its_sequence_with_an_error_and_no_other() -> None:
    free = make_request("free", max_tokens=8)
    rig = rig_for(recite("5 6 -1"), free, recite("4 3 2 1", "other"))
    rig.run()
    assert (rig.tokens("r"), rig.reason("r")) == ([5, 6], FinishReason.ERROR)
    assert "could not be kept to its grammar: the text is lost" in str(rig.outputs["r"][-1].error)
    assert rig.tokens("free") == expected_tokens(free, 64)[0]
    assert rig.tokens("other") == [4, 3, 2, 1]
    assert rig.scheduler.totals.failed_steps == 0


class Liar(Recital):
    """Its masks allow what it does not accept."""

    def accept(self, token_ids: Sequence[int]) -> int:
        if self.num_said == 1 and token_ids:
            raise GrammarError("a contradiction")
        return super().accept(token_ids)


def test_a_token_that_is_not_accepted_ends_the_sequence_without_it() -> None:
    class Liars(Recitals):
        def create(self, text: str) -> Grammar:
            return Liar([5, 6, 7]) if text else UNCONSTRAINED

    rig = make_rig(grammars=Liars())
    rig.worker.add(recite("x"))
    rig.run()
    assert (rig.tokens("r"), rig.reason("r")) == ([5], FinishReason.ERROR)
    assert rig.scheduler.kv.num_free_blocks == rig.scheduler.config.num_blocks


def test_a_preempted_sequence_goes_on_where_its_output_was() -> None:
    text = " ".join(str(20 + i) for i in range(20))
    low = recite(text, "low", 30, prompt=range(1, 20), priority=Priority.LOW)
    rig = rig_for(low, num_blocks=13)
    for _ in range(8):
        rig.step()
    rig.worker.add(make_request("high", range(30, 46), 8, Priority.HIGH))
    rig.run()
    assert rig.scheduler.totals.preemptions >= 1
    assert rig.tokens("low") == [20 + i for i in range(20)]
    assert rig.reason("low") is FinishReason.STOP


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("drafts", [[5, 6, 7, 8, 9], [5, 6, 1, 8, 9], [1, 1, 1, 1, 1]])
def test_drafts_change_nothing_but_the_number_of_steps(drafts: list[int], length: int) -> None:
    proposer = FixedDrafts(drafts, length)
    rig = rig_for(recite("5 6 7 8 9"), proposer=proposer)
    rig.run()
    assert (rig.tokens("r"), rig.reason("r")) == ([5, 6, 7, 8, 9], FinishReason.STOP)
    assert proposer.num_proposed > 0


def test_drafts_that_are_right_save_steps_and_do_not_pass_the_end() -> None:
    rig = rig_for(recite("5 6 7 8 9"), proposer=FixedDrafts([5, 6, 7, 8, 9, END, END], 4))
    rig.run()
    assert rig.tokens("r") == [5, 6, 7, 8, 9]
    assert rig.num_steps == 2


def test_drafts_that_a_grammar_does_not_allow_are_never_computed() -> None:
    with_wrong = rig_for(recite("5 6 7 8"), proposer=FixedDrafts([5, 1, 1, 1, 1], 3))
    with_none = rig_for(recite("5 6 7 8"))
    with_wrong.run()
    with_none.run()
    assert with_wrong.runner.batch_sizes == with_none.runner.batch_sizes


def test_a_failed_step_is_tried_again_without_harm() -> None:
    rig = rig_for(recite("5 6 7"))
    rig.runner.raise_at = {1: RuntimeError("injected")}
    rig.run()
    assert (rig.tokens("r"), rig.reason("r")) == ([5, 6, 7], FinishReason.STOP)
