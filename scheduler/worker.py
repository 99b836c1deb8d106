"""One step of the engine, from plan to outputs: schedule, execute, sample, commit, propose.

What the step needs from the engine is declared here as protocols. Knows no device and no policy.

Failure. Whatever raises before `commit` has changed nothing that counts, so a failed step is
tried once more as it is. If it fails again, each of its sequences is run alone, and those that
still fail end with an error while the others have their step. There is no bisection: it would
save a few runs in a case that should never happen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from engine.batch import Batch, Float32Array
from engine.errors import DeviceUnavailable, StepInterrupted
from engine.grammar import GrammarError
from engine.lane_usage import Usage, no_usage
from engine.logprobs import TokenLogprobs
from engine.recorder import NO_RECORDER, Record, record_nothing
from engine.sampler import Sampled, SampleRow
from engine.span_recorder import SpanRecorder
from engine.speculation.step_costs import StepCosts
from scheduler.batch_builder import BatchBuilder
from scheduler.messages import (
    GenerationRequest,
    StepOutput,
    StepResult,
    ToEngine,
    TraceResult,
)
from scheduler.output import grammar_error, refused_output
from scheduler.plan import Plan, StepResults
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.stats import snapshot
from scheduler.step_trace import StepTrace, Tracing, Untraced

logger = logging.getLogger(__name__)

MAX_FAILED_PROPOSALS = 3
"""In a row; then no more drafts are asked for."""

NOTHING_COMPUTED = 0
"""No class is better than this one."""

STEP_ERROR = "the model failed repeatedly while computing this request"


class Runner(Protocol):
    def execute(self, batch: Batch) -> Float32Array:
        """Logits [R, V] float32 of the batch's `logits_rows`, valid until the next call.

        Writes keys and values of all its tokens to their slots. May raise anything; then those
        slots hold garbage and the batch can be executed again. StepInterrupted is no failure.
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
        """Set the drafts of these sequences, each of which is about to decode one token.

        Drafts that a sequence's grammar does not allow are dropped afterwards. If it raises there
        are none.
        """
        ...


def _nothing() -> None:
    """Of a runner that cannot be interrupted."""


class NoProposer:
    def propose(self, sequences: list[Sequence]) -> None:
        pass


class ModelWorker:
    """`step_costs` is told how long each step of decodes took: a proposer may look at it.

    `usage` tells what the runner's devices have done, `record` makes the runner tell a recorder,
    `interrupt` asks it to give up the step that it computes.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: TokenSampler,
        proposer: Proposer | None = None,
        step_costs: StepCosts | None = None,
        usage: Callable[[], Usage] = no_usage,
        record: Record = record_nothing,
        interrupt: Callable[[], None] = _nothing,
    ) -> None:
        self._interrupt = interrupt
        self._computed_class = NOTHING_COMPUTED
        self._usage = usage
        self._record = record
        self._step_costs = step_costs or StepCosts()
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._proposer: Proposer = proposer or NoProposer()
        self._builder = BatchBuilder(scheduler.config)
        self._tracing: Tracing = Untraced()
        self._hand_over: Callable[[], None] = _no_trace
        self._num_failed_proposals = 0
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

    def arrived(self, message: ToEngine) -> None:
        """From any thread, as soon as it is known: what is more urgent than all that is being
        computed does not wait for its end. It is still to be added."""
        if isinstance(message, GenerationRequest) and message.priority < self._computed_class:
            self._interrupt()

    def abort(self, request_id: str) -> None:
        self._scheduler.abort(request_id)

    def check_invariants(self) -> list[str]:
        return self._scheduler.check_invariants()

    def trace(self, num_steps: int, send: Callable[[TraceResult], None]) -> None:
        """Record the next steps; `send` gets them with the last one, or when the trace is ended."""
        self.end_trace()
        recorder = SpanRecorder()
        trace = StepTrace(num_steps, recorder, self.end_trace)
        self._record(recorder)
        self._tracing, self._hand_over = trace, lambda: send(trace.result)

    def end_trace(self) -> None:
        """Hand over what there is; nothing if there is no trace."""
        hand_over, self._hand_over = self._hand_over, _no_trace
        self._record(NO_RECORDER)
        self._tracing = Untraced()
        hand_over()

    def step(self) -> StepResult:
        self._tracing.timer.start()
        plan = self._scheduler.schedule()
        self._tracing.timer.lap("schedule")
        try:
            results = self._run_until_settled(plan) if plan.sequences else StepResults()
        except StepInterrupted:  # forgotten by planning another one
            self._scheduler.totals.interrupted_steps += 1
            plan, results = plan.without_sequences(), StepResults()
        outputs = self._scheduler.commit(plan, results)
        self._tracing.timer.lap("commit")
        self._propose(plan)
        self._tracing.timer.lap("propose")
        result = self._result(plan, outputs)
        self._tracing.stepped(plan, result.stats)
        return result

    def _propose(self, plan: Plan) -> None:
        decoding = [s for s in plan.sequences if not s.is_finished and s.num_pending_tokens == 1]
        if not decoding or self._num_failed_proposals >= MAX_FAILED_PROPOSALS:
            return
        try:
            self._proposer.propose(decoding)
            self._num_failed_proposals = 0
        except Exception as exc:  # drafts are not worth a request
            self._num_failed_proposals += 1
            logger.error("no drafts: they could not be made", exc_info=exc)
            for sequence in decoding:
                sequence.set_drafts([])
        for sequence in decoding:
            if sequence.draft_token_ids:
                drop_forbidden_drafts(sequence)

    def _run_until_settled(self, plan: Plan) -> StepResults:
        for attempt in ("", " again"):
            try:
                return self._run(plan)
            except StepInterrupted:
                raise
            except DeviceUnavailable as exc:  # it has waited already, and says for what
                return self._refuse(plan, exc)
            except Exception as exc:  # whatever the device raises must not end the loop
                self._note_failure(plan, attempt, exc)
        return self._run_one_by_one(plan)

    def _refuse(self, plan: Plan, exc: DeviceUnavailable) -> StepResults:
        self._note_failure(plan, " for want of a device", exc)
        count = len(plan.sequences)
        errors = dict.fromkeys(range(count), str(exc))
        return StepResults([[] for _ in range(count)], errors=errors, is_unavailable=True)

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
        except StepInterrupted:
            raise
        except Exception as exc:  # the culprit, or a device that is gone
            self._note_failure(plan, " alone", exc)
            return StepResults(sampled=[[]], errors={0: STEP_ERROR})

    def _note_failure(self, plan: Plan, attempt: str, exc: Exception) -> None:
        self._scheduler.totals.failed_steps += 1
        self._tracing.timer.lap("execute")
        num_sequences = len(plan.sequences)
        logger.error("a step of %d sequences failed%s", num_sequences, attempt, exc_info=exc)

    def _run(self, plan: Plan) -> StepResults:
        batch = self._builder.build(plan)
        self._tracing.timer.lap("build")
        self._tracing.built(batch)
        logits = self._execute(plan, batch)
        seconds = self._tracing.timer.lap("execute")
        devices = self._usage().devices
        for sequence in plan.sequences:
            sequence.note_devices(devices)
        results = self._sample(plan, logits)
        seconds += self._tracing.timer.lap("sample")
        if plan.total_tokens == len(batch.logits_rows):
            self._step_costs.observe(plan.total_tokens, seconds)
        return results

    def _execute(self, plan: Plan, batch: Batch) -> Float32Array:
        self._computed_class = min(sequence.rank[0] for sequence in plan.sequences)
        try:
            return self._runner.execute(batch)
        finally:
            self._computed_class = NOTHING_COMPUTED

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
            self._tracing.timer,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=scheduler.config.num_blocks,
            num_free_blocks=scheduler.kv.num_free_blocks,
            num_step_tokens=plan.total_tokens,
            queue_times_s=plan.queue_times_s,
            usage=self._usage(),
        )
        return StepResult((*refused, *outputs), stats)


def _no_trace() -> None:
    """Nothing to hand over."""


def drop_forbidden_drafts(sequence: Sequence) -> None:
    """Of drafts drawn at random the first one that is forbidden stays, to be rejected: to drop it
    would be to choose among draws, which would not be lossless."""
    num_allowed = sequence.grammar.num_allowed(sequence.draft_token_ids)
    sequence.keep_drafts(num_allowed + bool(sequence.drawn_drafts))


def add_sample_rows(
    rows: list[SampleRow], sequence: Sequence, first_row: int, num_rows: int
) -> None:
    """One row for the next token, and one behind each draft, as if the draft had come true.

    Raises GrammarError, and then adds none.
    """
    tokens, num_prompt = sequence.token_ids, sequence.num_prompt_tokens
    params, position = sequence.sampling, len(sequence.token_ids)
    drafts = sequence.draft_token_ids[: num_rows - 1]
    drawn = sequence.drawn_drafts[: num_rows - 1]
    masks = sequence.grammar.masks(drafts)
    for index in range(num_rows):
        assumed = tokens + drafts[:index] if index else tokens
        draft = drawn[index] if index < len(drawn) else None
        row = SampleRow(
            first_row + index, position + index, params, assumed, num_prompt, masks[index], draft
        )
        rows.append(row)
