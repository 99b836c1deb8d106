"""Drafts from a second, smaller model that reads the same block tables.

How far it drafts for a sequence is decided before anything is drawn, from how often its drafts
stood so far and from what steps of both models cost. Greedy and seeded sequences get the token
that the draft model would put there itself, by the same (seed, position); they are verified by
equality. A sequence whose seed nobody asked for gets random drafts, verified by rejection sampling.
Keys that the draft model lacks are computed when drafts are wanted, a bounded number in a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from engine.sampler import DrawnDraft, SampleRow
from engine.sampling_params import SamplingParams
from engine.speculation.draft_choice import NEVER, DraftGate, choose_drafts
from engine.speculation.draft_model import DraftModel, DraftSpan
from engine.speculation.step_costs import StepCosts
from scheduler.draft_pages import DraftPages, DraftPagesBook
from scheduler.kv_manager import KVManager
from scheduler.sequence import Sequence

MAX_CATCH_UP = 256
"""Tokens behind the newest ones that the draft model computes between two steps of the model."""

_FIRST_RATE, _FIRST_WEIGHT, _MAX_TRIES = 0.7, 6.0, 64.0
_PROBE_INTERVAL = 32
_UNMEASURED_RATIO = 0.25


@dataclass(slots=True)
class _Record:
    """How a sequence's drafts have fared. `given`: the drafts of the last time, as verified."""

    sequence: Sequence
    params: SamplingParams
    hits: float = _FIRST_RATE * _FIRST_WEIGHT
    tries: float = _FIRST_WEIGHT
    given: list[int] = field(default_factory=list)
    given_at: int = 0

    def learn(self) -> None:
        """`given` is the sequence's own list, so it holds what was not trimmed off."""
        came = self.sequence.token_ids[self.given_at : self.given_at + len(self.given)]
        num_hits = next(
            (i for i, (a, b) in enumerate(zip(self.given, came, strict=False)) if a != b),
            len(came),
        )
        self.hits += num_hits
        self.tries += min(num_hits + 1, len(self.given))
        self.given = []
        if self.tries > _MAX_TRIES:
            self.hits, self.tries = self.hits / 2, self.tries / 2


@dataclass(slots=True)
class _Drafting:
    """One sequence while drafts are being made for it."""

    record: _Record
    pages: DraftPages
    depth: int
    token_ids: list[int]
    num_known: int
    drawn: list[DrawnDraft] = field(default_factory=list)

    @property
    def drafts(self) -> list[int]:
        return self.token_ids[self.num_known :]

    @property
    def is_random(self) -> bool:
        params = self.record.params
        return not params.is_seeded and not params.is_greedy


class _CostsWithDrafting:
    """What drafts cost: their rows, and a step of the draft model for each round of them."""

    def __init__(self, costs: StepCosts, draft_costs: StepCosts) -> None:
        self._costs = costs
        self._draft_costs = draft_costs

    def relative(self, num_tokens: int, num_more: int) -> NDArray[np.float64]:
        rounds = -(-np.arange(1, num_more + 1) // num_tokens)
        return self._costs.relative(num_tokens, num_more) + rounds * self._ratio(num_tokens)

    def _ratio(self, num_tokens: int) -> float:
        if not (self._costs.is_measured and self._draft_costs.is_measured):
            return _UNMEASURED_RATIO
        return self._draft_costs.seconds(num_tokens) / self._costs.seconds(num_tokens)


class DraftModelProposer:
    """`max_draft_tokens` bounds the drafts of a sequence, `max_spare_rows` those of a step.

    `kv` is asked for blocks that a sequence is about to need anyway.
    """

    def __init__(
        self,
        model: DraftModel,
        kv: KVManager,
        max_draft_tokens: int,
        max_spare_rows: int,
        costs: StepCosts,
    ) -> None:
        self._model = model
        self._kv = kv
        self._depth = max_draft_tokens
        self._max_spare_rows = max_spare_rows
        self._draft_costs = StepCosts()
        self._costs = _CostsWithDrafting(costs, self._draft_costs)
        self._gate = DraftGate(max_draft_tokens, max_spare_rows, self._costs)
        self._book = DraftPagesBook(model.block_size)
        self._records: dict[int, _Record] = {}

    def propose(self, sequences: list[Sequence]) -> None:
        if not sequences or self._gate.least_chance(len(sequences)) == NEVER:
            return
        records = [self._record_of(sequence) for sequence in sequences]
        depths = self._depths(records)
        drafting = self._catch_up(records, depths)
        self._draft(drafting)
        for each in drafting:
            record = each.record
            record.sequence.set_drafts(each.drafts, each.drawn)
            record.given, record.given_at = record.sequence.draft_token_ids, each.num_known

    def _record_of(self, sequence: Sequence) -> _Record:
        record = self._records.get(sequence.number)
        if record is None or record.sequence is not sequence:
            self._forget_finished()
            params = replace(sequence.sampling, logprobs=None)
            record = self._records[sequence.number] = _Record(sequence, params)
        record.learn()
        return record

    def _forget_finished(self) -> None:
        if len(self._records) > 64:
            for number in [n for n, r in self._records.items() if r.sequence.is_finished]:
                del self._records[number]

    def _depths(self, records: list[_Record]) -> list[int]:
        """How many drafts each gets. One now and then where they did not pay: things change."""
        rates = np.array([record.hits / record.tries for record in records])
        chances: NDArray[np.float64] = rates[:, None] ** np.arange(1.0, self._depth + 1)
        depths = choose_drafts(chances, self._max_spare_rows, self._costs).tolist()
        for index, record in enumerate(records):
            if depths[index] == 0 and record.sequence.num_tokens % _PROBE_INTERVAL == 0:
                depths[index] = 1
            depths[index] = min(
                depths[index], self._room(record.sequence, depths[index], len(records))
            )
        return [max(0, depth) for depth in depths]

    def _room(self, sequence: Sequence, depth: int, num_sequences: int) -> int:
        """The drafts for which there are blocks, and which can become output at all."""
        num_free = max(0, self._kv.num_free_blocks - 2 * num_sequences)
        num_blocks = len(sequence.block_table) + num_free
        room = num_blocks * self._model.block_size - sequence.num_tokens + 1
        return min(depth, room, sequence.max_num_tokens - sequence.num_tokens - 1)

    def _catch_up(self, records: list[_Record], depths: list[int]) -> list[_Drafting]:
        """Those that can be drafted at this step; of one other, a part of what it lacks is done."""
        ready: list[_Drafting] = []
        spans: list[tuple[DraftPages, int]] = []
        budget = min(MAX_CATCH_UP, self._model.max_tokens - 2 * len(records))
        for record, depth in zip(records, depths, strict=True):
            if depth == 0 or not self._kv.reserve(
                record.sequence, record.sequence.num_tokens + depth - 1
            ):
                continue
            pages = self._book.of(record.sequence)
            num_tokens = record.sequence.num_tokens
            num_missing = num_tokens - pages.num_valid
            if num_missing - 2 <= budget:
                budget -= max(0, num_missing - 2)
                tokens = list(record.sequence.token_ids)
                ready.append(_Drafting(record, pages, depth, tokens, num_tokens))
            elif budget > 0:
                spans.append((pages, pages.num_valid + budget))
                budget = 0
        for pages, end in spans:
            self._compute_prefix(pages, end)
        return ready

    def _compute_prefix(self, pages: DraftPages, end: int) -> None:
        tokens = pages.sequence.token_ids[pages.num_valid : end]
        self._book.will_write(pages, end)
        self._model.execute([DraftSpan(tokens, pages.num_valid, pages.table)])
        self._book.wrote(pages, end, [])

    def _draft(self, drafting: list[_Drafting]) -> None:
        """Round after round, one token for each sequence that wants another."""
        active = [each for each in drafting if each.depth > 0]
        for each in active:
            self._book.will_write(each.pages, each.num_known + each.depth - 1)
        starts = [each.pages.num_valid for each in active]
        while active:
            spans = [
                DraftSpan(each.token_ids[start:], start, each.pages.table)
                for each, start in zip(active, starts, strict=True)
            ]
            began_s = perf_counter()
            logits = self._model.execute(spans)
            chosen = self._choose(logits, active)
            if all(len(span.token_ids) == 1 for span in spans):
                self._draft_costs.observe(len(spans), perf_counter() - began_s)
            for each in active:
                self._book.wrote(each.pages, each.num_known, each.drafts)
            for each, token in zip(active, chosen, strict=True):
                if token is not None:
                    each.token_ids.append(token)
            active = [
                each
                for each, token in zip(active, chosen, strict=True)
                if token is not None and len(each.drafts) < each.depth
            ]
            starts = [len(each.token_ids) - 1 for each in active]

    def _choose(self, logits: np.ndarray, active: list[_Drafting]) -> list[int | None]:
        chosen: list[int | None] = [None] * len(active)
        rows, owners = [], []
        for index, each in enumerate(active):
            sequence, position = each.record.sequence, len(each.token_ids)
            if each.is_random:
                drawn = self._model.draw(logits[index], each.record.params, position)
                if drawn is not None:
                    each.drawn.append(drawn)
                    chosen[index] = drawn.token_id
                continue
            owners.append(index)
            rows.append(
                SampleRow(
                    index, position, each.record.params, each.token_ids, sequence.num_prompt_tokens
                )
            )
        for index, token in zip(owners, self._model.choose(logits, rows), strict=True):
            chosen[index] = token
        return chosen
