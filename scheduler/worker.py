"""One step of the engine, from plan to outputs: schedule, execute, sample, commit, propose.

What the step needs from the engine is declared here as protocols. Knows no device and no policy.

Failure. Whatever raises before `commit` has changed nothing that counts, so a failed step is
tried once more as it is. If it fails again, each of its sequences is run alone, and those that
still fail end with an error while the others have their step. There is no bisection: it would
save a few runs in a case that should never happen.
"""

from __future__ import annotations

import logging
from typing import Protocol

from engine.batch import Batch, Float32Array
from engine.grammar import GrammarError
from engine.logprobs import TokenLogprobs
from engine.sampler import Sampled, SampleRow
from scheduler.batch_builder import BatchBuilder
from scheduler.messages import GenerationRequest, StepOutput, StepResult
from scheduler.output import grammar_error, refused_output
from scheduler.plan import Plan, StepResults
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.stats import PhaseTimer, snapshot

logger = logging.getLogger(__name__)

STEP_ERROR = "the model failed repeatedly while computing this request"


class Runner(Protocol):
    def execute(self, batch: Batch) -> Float32Array:
        """Logits [R, V] float32 of the batch's `logits_rows`, valid until the next call.

        Writes keys and values of all its tokens to their slots. May raise anything; then those
        slots hold garbage and the batch can be executed again.
        """
        ...


class TokenSampler(Protocol):
    def sample(self, logits: Float32Array, rows: list[SampleRow]) -> list[Sampled]:
        """One token per row, in order. May write to the rows it is given."""
        ...

    def score(self, logits: Float32Array, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        """The logprob of a given token and of the `num_top` most likely ones."""
        ...


class Proposer(Protocol):
    def propose(self, sequences: list[Sequence]) -> None:
        """Set `draft_token_ids` of these sequences, each of which is about to decode one token.

        Drafts that a sequence's grammar does not allow are dropped afterwards.
        """
        ...


class NoProposer:
    def propose(self, sequences: list[Sequence]) -> None:
        pass


class ModelWorker:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: TokenSampler,
        proposer: Proposer | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._proposer: Proposer = proposer or NoProposer()
        self._builder = BatchBuilder(scheduler.config)
        self._timer = PhaseTimer()
        self._refused: list[StepOutput] = []

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._refused)

    def add(self, request: GenerationRequest) -> None:
        """Queue it; a request that can never run ends with an error in the next result."""
        try:
            self._scheduler.add(request)
        except ValueError as exc:
            logger.warning("request %s refused: %s", request.request_id, exc)
            self._refused.append(refused_output(request.request_id, str(exc)))

    def abort(self, request_id: str) -> None:
        self._scheduler.abort(request_id)

    def check_invariants(self) -> list[str]:
        return self._scheduler.check_invariants()

    def step(self) -> StepResult:
        self._timer.start()
        plan = self._scheduler.schedule()
        results = self._run_until_settled(plan) if plan.sequences else StepResults()
        outputs = self._scheduler.commit(plan, results)
        self._propose(plan)
        self._timer.lap("commit")
        return self._result(plan, outputs)

    def _propose(self, plan: Plan) -> None:
        decoding = [s for s in plan.sequences if not s.is_finished and s.num_pending_tokens == 1]
        self._proposer.propose(decoding)
        for sequence in decoding:
            if sequence.draft_token_ids:
                num_allowed = sequence.grammar.num_allowed(sequence.draft_token_ids)
                del sequence.draft_token_ids[num_allowed:]

    def _run_until_settled(self, plan: Plan) -> StepResults:
        for attempt in ("", " again"):
            try:
                return self._run(plan)
            except Exception as exc:  # whatever the device raises must not end the loop
                self._note_failure(plan, attempt, exc)
        return self._run_one_by_one(plan)

    def _run_one_by_one(self, plan: Plan) -> StepResults:
        if len(plan.sequences) == 1:
            return StepResults(sampled=[[]], errors={0: STEP_ERROR})
        merged = StepResults()
        for index in range(len(plan.sequences)):
            alone = self._run_alone(plan.only(index))
            merged.sampled += alone.sampled
            if 0 in alone.prompt_logprobs:
                merged.prompt_logprobs[index] = alone.prompt_logprobs[0]
            if 0 in alone.errors:
                merged.errors[index] = alone.errors[0]
        return merged

    def _run_alone(self, plan: Plan) -> StepResults:
        try:
            return self._run(plan)
        except Exception as exc:  # the culprit, or a device that is gone
            self._note_failure(plan, " alone", exc)
            return StepResults(sampled=[[]], errors={0: STEP_ERROR})

    def _note_failure(self, plan: Plan, attempt: str, exc: Exception) -> None:
        self._scheduler.totals.failed_steps += 1
        num_sequences = len(plan.sequences)
        logger.error("a step of %d sequences failed%s", num_sequences, attempt, exc_info=exc)

    def _run(self, plan: Plan) -> StepResults:
        batch = self._builder.build(plan)
        self._timer.lap("schedule")
        logits = self._runner.execute(batch)
        self._timer.lap("execute")
        results = self._sample(plan, logits)
        self._timer.lap("sample")
        return results

    def _sample(self, plan: Plan, logits: Float32Array) -> StepResults:
        results = StepResults()
        rows: list[SampleRow] = []
        row = 0
        for index, sequence in enumerate(plan.sequences):
            num_prompt = plan.num_prompt_rows[index]
            if num_prompt:
                scored = self._score_prompt(sequence, logits, row, num_prompt)
                results.prompt_logprobs[index] = scored
            row += num_prompt
            num_sample = plan.num_sample_rows[index]
            if num_sample:
                try:
                    add_sample_rows(rows, sequence, row, num_sample)
                except GrammarError as exc:
                    results.errors[index] = grammar_error(exc)
            row += num_sample
        sampled = self._sampler.sample(logits, rows) if rows else []
        at = 0
        for index, num_sample in enumerate(plan.num_sample_rows):
            num_sampled = 0 if index in results.errors else num_sample
            results.sampled.append(sampled[at : at + num_sampled])
            at += num_sampled
        return results

    def _score_prompt(
        self, sequence: Sequence, logits: Float32Array, row: int, num_rows: int
    ) -> list[TokenLogprobs]:
        """Row i of the chunk was computed on token i and predicts the one after it."""
        num_top = sequence.request.prompt_logprobs or 0
        following = sequence.num_computed_tokens + 1
        return [
            self._sampler.score(logits, row + i, sequence.token_ids[following + i], num_top)
            for i in range(num_rows)
        ]

    def _result(self, plan: Plan, outputs: tuple[StepOutput, ...]) -> StepResult:
        scheduler = self._scheduler
        scheduler.totals.steps += 1
        refused, self._refused = self._refused, []
        stats = snapshot(
            scheduler.totals,
            self._timer,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=scheduler.config.num_blocks,
            num_free_blocks=scheduler.kv.num_free_blocks,
            num_step_tokens=plan.total_tokens,
            queue_times_s=plan.queue_times_s,
        )
        return StepResult((*refused, *outputs), stats)


def add_sample_rows(
    rows: list[SampleRow], sequence: Sequence, first_row: int, num_rows: int
) -> None:
    """One row for the next token, and one behind each draft, as if the draft had come true.

    Raises GrammarError, and then adds none.
    """
    tokens, num_prompt = sequence.token_ids, sequence.num_prompt_tokens
    params, position = sequence.sampling, len(sequence.token_ids)
    drafts = sequence.draft_token_ids[: num_rows - 1]
    masks = sequence.grammar.masks(drafts)
    rows.append(SampleRow(first_row, position, params, tokens, num_prompt, masks[0]))
    for index in range(1, num_rows):
        assumed = tokens + drafts[:index]
        row = SampleRow(
            first_row + index, position + index, params, assumed, num_prompt, masks[index]
        )
        rows.append(row)
