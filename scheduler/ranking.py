"""All unfinished sequences in rank order, running and waiting together.

Keeps the order and the seats' count, and sorts only when a rank can have changed: something came,
aged, was preempted or has begun to wait. Knows no blocks and no tokens.
"""

from __future__ import annotations

import math

from scheduler import policy
from scheduler.policy import SchedulerConfig
from scheduler.sequence import Sequence, Status


class Ranking:
    """`sequences`: best rank first, right after `refresh`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.sequences: list[Sequence] = []
        self.num_running = 0
        self._config = config
        self._is_stale = False
        self._next_aging_s = math.inf

    @property
    def num_waiting(self) -> int:
        return len(self.sequences) - self.num_running

    def add(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)
        self._is_stale = True

    def remove(self, sequence: Sequence) -> None:
        """To be called while its status still says whether it has a seat."""
        self.sequences.remove(sequence)
        if sequence.status is Status.RUNNING:
            self.num_running -= 1

    def seat(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        self.num_running += 1

    def unseat(self, sequence: Sequence, now_s: float) -> None:
        sequence.status = Status.WAITING
        self.num_running -= 1
        self.begin_waiting(sequence, now_s)

    def begin_waiting(self, sequence: Sequence, now_s: float) -> None:
        """It was not served in this step; from now on it ages."""
        if sequence.waiting_since_s is None:
            sequence.waiting_since_s = now_s
        self._is_stale = True

    def refresh(self, now_s: float) -> None:
        if not self._is_stale and now_s < self._next_aging_s:
            return
        config, next_aging_s = self._config, math.inf
        for sequence in self.sequences:
            waited_s = sequence.waited_until(now_s)
            priority = sequence.request.priority
            aged_class = policy.class_after_aging(priority, waited_s, config.aging_s)
            is_capped = sequence.num_preemptions >= config.max_preemptions
            sequence.rank = policy.rank(aged_class, is_capped, sequence.arrival_s, sequence.number)
            if aged_class > 0 and sequence.waiting_since_s is not None:
                due_s = now_s + policy.next_aging_s(waited_s, config.aging_s)
                next_aging_s = min(next_aging_s, due_s)
        self.sequences.sort(key=lambda sequence: sequence.rank)
        self._next_aging_s = next_aging_s
        self._is_stale = False
