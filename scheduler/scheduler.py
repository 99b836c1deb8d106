"""The scheduler: takes requests, plans steps, takes their results. Owned by the loop thread.

`schedule` decides and reserves; `commit` makes a step's results real. Between the two nothing
that anybody can see has changed: slots past `num_computed_tokens` are invisible, so a step that
failed is forgotten by simply planning the next one. Knows ids and counters; no arrays, no text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from engine.grammar import GrammarError, GrammarSource, NoGrammars
from engine.logprobs import TokenLogprobs
from engine.sampler import Sampled
from scheduler import output
from scheduler.kv_manager import KVManager
from scheduler.messages import FinishReason, GenerationRequest, StepOutput
from scheduler.plan import Plan, StepResults
from scheduler.policy import SchedulerConfig, check_config
from scheduler.ranking import Ranking
from scheduler.sequence import FINISHED_STATUS, Sequence, Status
from scheduler.stats import Totals
from scheduler.step_pass import StepPass
from scheduler.verify import verify

RUNNING = Status.RUNNING


class Scheduler:
    """`clock` gives `time.time()` seconds, like the times in the requests.

    `grammars` makes the grammar of each sequence from the text in its request.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.time,
        grammars: GrammarSource | None = None,
    ) -> None:
        """Raises ValueError if the numbers of `config` contradict each other."""
        check_config(config)
        self.config = config
        self.totals = Totals()
        self.kv = KVManager(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self._clock = clock
        self._grammars: GrammarSource = grammars or NoGrammars()
        self._ranking = Ranking(config)
        self._by_id: dict[str, Sequence] = {}
        self._ended: list[StepOutput] = []  # ended outside a step, to be reported with the next
        self._num_added = 0
        self._next_deadline_s = math.inf

    @property
    def num_running(self) -> int:
        return self._ranking.num_running

    @property
    def num_waiting(self) -> int:
        return self._ranking.num_waiting

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or at least report something."""
        return bool(self._by_id or self._ended)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises ValueError, with the numbers, if it can never run.

        A GrammarError is one: the request's grammar cannot be used.
        """
        if request.request_id in self._by_id:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        now_s = self._clock()
        grammar = self._grammars.create(request.grammar)
        length = self.config.max_model_len
        sequence = Sequence(request, self._num_added, now_s, length, grammar)
        self._refuse_impossible(sequence)
        self._num_added += 1
        self._by_id[request.request_id] = sequence
        self._ranking.add(sequence)
        if request.deadline_s is not None:
            self._next_deadline_s = min(self._next_deadline_s, request.deadline_s)

    def abort(self, request_id: str) -> None:
        """Drop a sequence in whatever phase it is; its blocks are free on return."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._end(sequence, FinishReason.ABORT)

    def schedule(self) -> Plan:
        """The next step. At least one sequence is in it if any is unfinished."""
        now_s = self._clock()
        if now_s >= self._next_deadline_s:
            self._end_overdue(now_s)
        self._ranking.refresh(now_s)
        return StepPass(self.config, self.kv, self._ranking, self.totals, now_s).run()

    def commit(self, plan: Plan, results: StepResults) -> tuple[StepOutput, ...]:
        """Append tokens, publish full blocks, release what ended; what there is to tell.

        Sequences of the plan that were aborted meanwhile are passed over. Outputs without news
        (a chunk of a prompt) are left out.
        """
        outputs, self._ended = self._ended, []
        for index, sequence in enumerate(plan.sequences):
            if sequence.status is not RUNNING:
                continue
            error = self._error_of(index, results)
            if error is not None:
                unavailable = results.is_unavailable
                reason = FinishReason.UNAVAILABLE if unavailable else FinishReason.ERROR
                outputs.append(output.ended_output(sequence, reason, error))
                self._release(sequence, reason)
                continue
            self._keep_prompt_logprobs(sequence, results.prompt_logprobs.get(index))
            news = self._commit_sequence(sequence, plan.num_tokens[index], results.sampled[index])
            if news is not None:
                outputs.append(news)
        return tuple(outputs)

    def check_invariants(self) -> list[str]:
        """All violations in words. To be called between steps."""
        sequences = self._ranking.sequences
        found = self.kv.check_invariants(sequences)
        if sorted(map(id, sequences)) != sorted(map(id, self._by_id.values())):
            found.append("the ranking and the table of ids hold different sequences")
        num_running = sum(1 for s in sequences if s.status is RUNNING)
        if num_running != self.num_running or num_running > self.config.max_num_seqs:
            found.append(
                f"{num_running} sequences run, counted {self.num_running}, "
                f"seats {self.config.max_num_seqs}"
            )
        for sequence in sequences:
            if sequence.is_finished:
                found.append(f"{sequence} is finished but not released")
            if sequence.num_pending_tokens < 1:
                found.append(f"{sequence} has nothing left to compute")
        return found

    def _refuse_impossible(self, sequence: Sequence) -> None:
        config, num_tokens = self.config, sequence.num_tokens
        if sequence.num_prompt_tokens == 0:
            raise ValueError("the prompt is empty: it needs at least 1 token")
        if min(sequence.token_ids) < 0:
            raise ValueError(f"token ids must not be negative, got {min(sequence.token_ids)}")
        if num_tokens > config.max_model_len:
            raise ValueError(
                f"{num_tokens} tokens exceed the context of {config.max_model_len} tokens"
            )
        num_needed = self.kv.num_blocks_for(sequence.max_num_computed_tokens)
        if num_needed > config.num_blocks:
            raise ValueError(
                f"{sequence.num_prompt_tokens} prompt tokens and up to "
                f"{sequence.sampling.max_tokens} new ones need {num_needed} blocks of "
                f"{config.block_size} tokens, the KV memory has {config.num_blocks}"
            )

    def _end_overdue(self, now_s: float) -> None:
        self._next_deadline_s = math.inf
        for sequence in list(self._by_id.values()):
            deadline_s = sequence.request.deadline_s
            if deadline_s is None:
                continue
            if now_s >= deadline_s:
                self._end(sequence, FinishReason.DEADLINE)
            else:
                self._next_deadline_s = min(self._next_deadline_s, deadline_s)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._release(sequence, reason)
        self._ended.append(output.ended_output(sequence, reason))

    def _release(self, sequence: Sequence, reason: FinishReason) -> None:
        self._ranking.remove(sequence)
        del self._by_id[sequence.request_id]
        self.kv.free(sequence)
        sequence.set_drafts([])
        sequence.status = FINISHED_STATUS[reason]

    def _error_of(self, index: int, results: StepResults) -> str | None:
        if index in results.errors:
            return results.errors[index]
        for token in results.sampled[index]:
            if token.token_id is None:
                return output.NAN_ERROR
        entries = results.prompt_logprobs.get(index)
        if entries and any(math.isnan(entry.logprob) for entry in entries):
            return output.NAN_ERROR
        return None

    def _keep_prompt_logprobs(
        self, sequence: Sequence, entries: list[TokenLogprobs] | None
    ) -> None:
        if entries and sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs += entries

    def _commit_sequence(
        self, sequence: Sequence, num_tokens: int, sampled: list[Sampled]
    ) -> StepOutput | None:
        if not sampled:
            return self._commit_chunk(sequence, num_tokens)
        new_tokens, num_drafts = sampled, sequence.num_drafts
        if num_drafts:
            new_tokens = verify(sequence.draft_token_ids, sampled)
            sequence.set_drafts([])
        num_verified = len(new_tokens) - 1
        new_ids = tuple(token.token_id for token in new_tokens if token.token_id is not None)
        try:
            num_new, reason = self._follow(sequence, new_ids)
        except GrammarError as exc:
            self._release(sequence, FinishReason.ERROR)
            return output.ended_output(sequence, FinishReason.ERROR, output.grammar_error(exc))
        if num_new < len(new_ids):
            new_tokens, new_ids = new_tokens[:num_new], new_ids[:num_new]
        sequence.token_ids += new_ids
        # Right for drafts too: the slots of the rejected ones are past this mark.
        sequence.num_computed_tokens = len(sequence.token_ids) - 1
        self.kv.publish(sequence)
        drafts = output.DraftCounts(num_drafts, min(num_verified, num_new))
        self.totals.generated_tokens += num_new
        self.totals.draft_tokens += drafts.num_drafted
        self.totals.accepted_tokens += drafts.num_accepted
        prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        news = output.token_output(sequence, new_tokens, new_ids, reason, prompt_logprobs, drafts)
        if reason is not None:
            self._release(sequence, reason)
        return news

    def _follow(
        self, sequence: Sequence, new_ids: tuple[int, ...]
    ) -> tuple[int, FinishReason | None]:
        """Move the grammar; how many of the tokens count, and whether the last of them is the end.

        An output that its grammar terminates is complete, whatever else ends there. Raises
        GrammarError.
        """
        num_new, reason = output.end_of(sequence, new_ids)
        num_accepted = sequence.grammar.accept(new_ids[:num_new])
        if sequence.grammar.is_terminated:
            return num_accepted, FinishReason.STOP
        return num_new, reason

    def _commit_chunk(self, sequence: Sequence, num_tokens: int) -> StepOutput | None:
        """A part of a prompt; or its end, if no token was wanted."""
        sequence.num_computed_tokens += num_tokens
        self.kv.publish(sequence)
        if sequence.num_pending_tokens > 0:
            return None
        news = output.token_output(sequence, [], (), FinishReason.LENGTH, sequence.prompt_logprobs)
        self._release(sequence, FinishReason.LENGTH)
        return news
