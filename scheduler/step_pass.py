"""One pass in rank order over running and waiting sequences: who computes how many tokens.

An object with the life of one `schedule` call, so that budgets are attributes and not variables
threaded through a long loop. The rules it applies are stated in `policy.py`. It seats, preempts
and reserves; all of that is invisible outside and valid whether or not the step then succeeds.

Urgency: who is of a worse class (after aging) than a prompt of the step has no part in it, so that
a prompt of a better class takes as long as it would alone. What waits for it ages.

Progress: the first running sequence is always planned, because all the others are possible
victims and `add` has checked that it fits alone. If none runs, the first waiting one is admitted.

Memory. A waiting sequence is admitted only if the free blocks hold all of its tokens beside what
the running prefills still need. A running one that cannot grow and has nobody behind it waits in
place with its blocks; whoever is in front takes them if need be. Who is refused blocks the queue
behind it, except for a better class that can take the place of a victim: then nothing that the
refused one waits for is used up, as the number of victims only falls.
"""

from __future__ import annotations

from scheduler import policy
from scheduler.kv_manager import KVManager
from scheduler.messages import Priority
from scheduler.plan import Plan
from scheduler.policy import SchedulerConfig
from scheduler.ranking import Ranking
from scheduler.sequence import Sequence, Status
from scheduler.stats import Totals

RUNNING = Status.RUNNING
MAX_CLASS = max(Priority)


class StepPass:
    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        ranking: Ranking,
        totals: Totals,
        now_s: float,
    ) -> None:
        self._config = config
        self._kv = kv
        self._ranking = ranking
        self._totals = totals
        self._now_s = now_s
        self._sequences = ranking.sequences
        num_decodes = sum(
            1
            for s in self._sequences
            if s.status is RUNNING and len(s.token_ids) - s.num_computed_tokens == 1
        )
        num_prefills = len(self._sequences) - num_decodes
        self._has_other_prefills = num_prefills > 1
        self._prefill_left = policy.prefill_budget(config, num_decodes)
        num_promised = num_decodes + (self._prefill_left if num_prefills else 0)
        self._drafts_left = config.max_num_batched_tokens - num_promised
        self._spare_rows = config.num_logits_rows - config.max_num_seqs
        self._best_blocked: int | None = None
        self._worst_class: int = MAX_CLASS
        self._plan = Plan()
        self._prefills: list[int] = []  # indices into the plan

    def run(self) -> Plan:
        for index, sequence in enumerate(self._sequences):
            if sequence.rank[0] > self._worst_class:
                if sequence.status is RUNNING:
                    self._ranking.begin_waiting(sequence, self._now_s)
            elif sequence.status is RUNNING:
                self._plan_running(index, sequence)
            elif self._may_enter(sequence):
                self._plan_waiting(index, sequence)
        if self._prefills:
            self._top_up_first_prefill()
            self._fill_to_bucket()
        self._count_rows()
        return self._plan

    def _plan_running(self, index: int, sequence: Sequence) -> None:
        num_pending = len(sequence.token_ids) - sequence.num_computed_tokens
        if num_pending == 1:
            num_wanted = 1 + (self._trim_drafts(sequence) if sequence.draft_token_ids else 0)
        else:
            num_wanted = self._chunk(sequence, num_pending)
        num_granted = self._reserve(index, sequence, num_wanted)
        if num_granted == 0:
            self._ranking.begin_waiting(sequence, self._now_s)
        else:
            self._add(sequence, num_granted, num_pending > 1)

    def _add(self, sequence: Sequence, num_tokens: int, is_prefill: bool) -> None:
        plan = self._plan
        if is_prefill:
            self._prefills.append(len(plan.sequences))
            self._prefill_left -= num_tokens
            self._worst_class = min(self._worst_class, sequence.rank[0])
            if sequence.prompt_logprobs is not None:
                self._spare_rows -= num_tokens - 1
        plan.sequences.append(sequence)
        plan.num_tokens.append(num_tokens)
        if sequence.waiting_since_s is not None:
            sequence.stop_waiting(self._now_s)

    def _chunk(self, sequence: Sequence, num_pending: int) -> int:
        """What a prefill may compute. Each row of logits beyond its own is one of the spare."""
        allowance = policy.chunk_allowance(
            self._prefill_left, not self._prefills, self._has_other_prefills
        )
        if sequence.prompt_logprobs is not None:
            allowance = min(allowance, 1 + self._spare_rows)
        return min(num_pending, allowance)

    def _trim_drafts(self, sequence: Sequence) -> int:
        """Drop the drafts that have no room; drafts never push anybody out."""
        kv, num_running = self._kv, self._ranking.num_running
        num_blocks = len(sequence.block_table) + max(0, kv.num_free_blocks - num_running)
        num_kept = min(
            sequence.num_drafts,
            self._drafts_left,
            self._spare_rows,
            sequence.max_num_tokens - sequence.num_tokens - 1,
            num_blocks * self._config.block_size - sequence.num_computed_tokens - 1,
        )
        num_kept = max(0, num_kept)
        sequence.keep_drafts(num_kept)
        self._drafts_left -= num_kept
        self._spare_rows -= num_kept
        return num_kept

    def _reserve(self, index: int, sequence: Sequence, num_wanted: int) -> int:
        """Blocks for its next tokens, taken from behind it if need be; how many tokens fit."""
        if num_wanted == 0:
            return 0
        kv, num_computed = self._kv, sequence.num_computed_tokens
        while not kv.reserve(sequence, num_computed + num_wanted):
            victim = self._last_running_behind(index)
            if victim is None:
                num_wanted = max(0, kv.capacity(sequence) - num_computed)
                return num_wanted if kv.reserve(sequence, num_computed + num_wanted) else 0
            self._preempt(victim)
        return num_wanted

    def _last_running_behind(self, index: int) -> Sequence | None:
        for candidate in range(len(self._sequences) - 1, index, -1):
            if self._sequences[candidate].status is RUNNING:
                return self._sequences[candidate]
        return None

    def _preempt(self, victim: Sequence) -> None:
        self._kv.free(victim)
        victim.set_drafts([])
        if victim.prompt_logprobs is not None:
            victim.prompt_logprobs = []
        victim.num_preemptions += 1
        self._totals.preemptions += 1
        self._ranking.unseat(victim, self._now_s)
        self._block(victim)

    def _block(self, refused: Sequence) -> None:
        priority = refused.request.priority
        if self._best_blocked is None or priority < self._best_blocked:
            self._best_blocked = priority

    def _may_enter(self, sequence: Sequence) -> bool:
        if self._prefill_left == 0:
            return False
        return self._best_blocked is None or sequence.request.priority < self._best_blocked

    def _plan_waiting(self, index: int, sequence: Sequence) -> None:
        matched = self._kv.match(sequence)
        if self._kv.pending_owner(sequence, len(matched)) is not None:
            return
        victims = self._find_victims(index, sequence, matched)
        if victims is None:
            self._block(sequence)
            return
        for victim in victims:
            self._preempt(victim)
        self._admit(sequence, matched)

    def _find_victims(
        self, index: int, sequence: Sequence, matched: list[int]
    ) -> list[Sequence] | None:
        """The fewest, lowest-ranked sequences that must go so that this one fits; None: never."""
        victims: list[Sequence] = []
        if self._best_blocked is None and self._fits(sequence, matched, victims):
            return victims
        priority = sequence.request.priority
        for candidate in reversed(self._sequences[index + 1 :]):
            if candidate.status is RUNNING and policy.may_take_from(priority, candidate.rank):
                victims.append(candidate)
                if self._fits(sequence, matched, victims):
                    return victims
        return None

    def _fits(self, sequence: Sequence, matched: list[int], victims: list[Sequence]) -> bool:
        if self._ranking.num_running - len(victims) >= self._config.max_num_seqs:
            return False
        kv = self._kv
        num_promised = sum(
            kv.num_missing_blocks(other)
            for other in self._sequences
            if other.status is RUNNING and other not in victims
        )
        num_needed = kv.num_blocks_for(sequence.num_tokens) - len(matched)
        num_free = kv.pool.num_free_after((v.block_table for v in victims), matched)
        return num_free - num_promised >= num_needed

    def _admit(self, sequence: Sequence, matched: list[int]) -> None:
        self._kv.attach(sequence, matched)
        self._ranking.seat(sequence)
        if not sequence.was_admitted:
            self._book_first_admission(sequence)
        num_tokens = self._chunk(sequence, sequence.num_pending_tokens)
        is_reserved = self._kv.reserve(sequence, sequence.num_computed_tokens + num_tokens)
        assert is_reserved, f"{sequence} was admitted without room"
        self._add(sequence, num_tokens, True)

    def _book_first_admission(self, sequence: Sequence) -> None:
        sequence.was_admitted = True
        sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        self._totals.prompt_tokens += sequence.num_prompt_tokens
        self._totals.prefix_queried_tokens += sequence.num_prompt_tokens
        self._totals.cached_tokens += sequence.num_cached_tokens
        self._plan.queue_times_s.append(max(0.0, self._now_s - sequence.arrival_s))
        self._plan.admitted.append(sequence)

    def _top_up_first_prefill(self) -> None:
        """What the other prefills left of their share goes to the first."""
        index = self._prefills[0]
        sequence, num_tokens = self._plan.sequences[index], self._plan.num_tokens[index]
        end = sequence.num_computed_tokens + num_tokens
        num_more = min(
            self._prefill_left,
            sequence.num_tokens - end,
            self._kv.capacity(sequence) - end,
        )
        is_limited_by_rows = sequence.prompt_logprobs is not None
        if num_more > 0 and not is_limited_by_rows and self._kv.reserve(sequence, end + num_more):
            self._plan.num_tokens[index] += num_more

    def _fill_to_bucket(self) -> None:
        buckets, plan = self._config.token_buckets, self._plan
        if not buckets:
            return
        chunks = [plan.num_tokens[index] for index in self._prefills]
        num_decode_tokens = sum(plan.num_tokens) - sum(chunks)
        cut = policy.fill_to_bucket(num_decode_tokens, chunks, buckets)
        for index, num_tokens in zip(self._prefills, cut, strict=True):
            plan.num_tokens[index] = num_tokens
        kept = [i for i, num_tokens in enumerate(plan.num_tokens) if num_tokens]
        plan.sequences = [plan.sequences[i] for i in kept]
        plan.num_tokens = [plan.num_tokens[i] for i in kept]

    def _count_rows(self) -> None:
        plan = self._plan
        total = 0
        for sequence, num_tokens in zip(plan.sequences, plan.num_tokens, strict=True):
            total += num_tokens
            start = sequence.num_computed_tokens
            end = start + num_tokens
            length = len(sequence.token_ids)
            if sequence.prompt_logprobs is None:
                plan.num_prompt_rows.append(0)
            else:
                num_rows = min(end, sequence.num_prompt_tokens - 1) - start
                plan.num_prompt_rows.append(max(0, num_rows))
            is_sampled = end >= length and length < sequence.max_num_tokens
            plan.num_sample_rows.append(1 + end - length if is_sampled else 0)
        plan.total_tokens = total
