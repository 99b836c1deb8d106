"""Drafts from what a sequence has already said, or was foretold to say: no second model.

Keeps one `MatchModel` a sequence and asks `choose_drafts` how much of what it foretells is worth a
row. Where drafts cannot pay (too many sequences for this lane) it does nothing at all; a match
model takes in what it missed when it is asked again. Knows no text and no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.speculation.draft_choice import NEVER, DraftGate, choose_drafts
from engine.speculation.match_model import MatchModel, MatchStatistics
from engine.speculation.step_costs import StepCosts
from scheduler.sequence import Sequence


@dataclass(slots=True)
class _Followed:
    sequence: Sequence
    model: MatchModel


class NgramProposer:
    """`max_draft_tokens` bounds the drafts of a sequence, `max_spare_rows` those of a step."""

    def __init__(self, max_draft_tokens: int, max_spare_rows: int, costs: StepCosts) -> None:
        self._depth = max_draft_tokens
        self._max_spare_rows = max_spare_rows
        self._costs = costs
        self._gate = DraftGate(max_draft_tokens, max_spare_rows, costs)
        self._statistics = MatchStatistics()
        self._followed: dict[int, _Followed] = {}
        self._drafts = np.zeros((0, max_draft_tokens), np.int32)
        self._chances = np.zeros((0, max_draft_tokens), np.float64)

    def propose(self, sequences: list[Sequence]) -> None:
        if not sequences:
            return
        least = self._gate.least_chance(len(sequences))
        if least == NEVER:
            return
        self._forget_finished(len(sequences))
        self._make_room(len(sequences))
        drafts, chances = self._drafts[: len(sequences)], self._chances[: len(sequences)]
        for row, sequence in enumerate(sequences):
            self._model_of(sequence).foretell(drafts[row], chances[row])
        if not any(chances.item(row, 0) > least for row in range(len(sequences))):
            return
        numbers = choose_drafts(chances, self._max_spare_rows, self._costs)
        for row, sequence in enumerate(sequences):
            sequence.set_drafts(drafts[row, : numbers[row]].tolist())

    def _model_of(self, sequence: Sequence) -> MatchModel:
        """Its match model, behind its newest token."""
        followed = self._followed.get(sequence.number)
        if followed is None or followed.sequence is not sequence:
            foretold = sequence.request.predicted_token_ids
            model = MatchModel(sequence.max_num_tokens, self._statistics, foretold)
            followed = self._followed[sequence.number] = _Followed(sequence, model)
        model = followed.model
        model.take(sequence.token_ids[model.num_tokens :], sequence.num_prompt_tokens)
        return model

    def _forget_finished(self, num_sequences: int) -> None:
        if len(self._followed) > 2 * num_sequences + 8:
            for number in [n for n, f in self._followed.items() if f.sequence.is_finished]:
                del self._followed[number]

    def _make_room(self, num_sequences: int) -> None:
        if num_sequences > len(self._drafts):
            self._drafts = np.zeros((num_sequences, self._depth), np.int32)
            self._chances = np.zeros((num_sequences, self._depth), np.float64)
