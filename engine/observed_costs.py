"""Measured costs corrected by what steps really take, and choices that do not flutter.

Pure over the numbers that it is given; one thread. A profile was measured on an idle machine; under
load, on battery or when hot the same call takes longer, and not equally so on every lane.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from engine.cost_profile import CostProfile
from engine.placement import bucket_of

NEW_WEIGHT = 0.1
"""Of one observation in the moving average, once there are ten; before, all count alike."""

STALE_WEIGHT = 0.5
STALE_AFTER = 100
"""Observations of anything since the last one of this: then what was known counts for less."""

MAX_JUMP = 4.0
"""One observation counts for at most so many times the average: a pause is not a price."""


@dataclass(slots=True)
class _Average:
    """Of observed / expected, and at which observation of anything it was last updated."""

    factor: float
    num_observed: int = 0
    observed_at: int = 0


class Factors:
    """Moving averages of how much longer things took than expected, 1.0 where nothing is known."""

    def __init__(self) -> None:
        self._averages: dict[Hashable, _Average] = {}
        self._num_observed = 0

    def get(self, key: Hashable) -> float | None:
        average = self._averages.get(key)
        return average.factor if average is not None else None

    def observe(self, key: Hashable, ratio: float, start: float = 1.0) -> None:
        """`start` is the average before the first observation."""
        average = self._averages.setdefault(key, _Average(start))
        self._num_observed += 1
        ratio = min(max(ratio, average.factor / MAX_JUMP), average.factor * MAX_JUMP)
        average.factor += self._weight(average) * (ratio - average.factor)
        average.num_observed += 1
        average.observed_at = self._num_observed

    def _weight(self, average: _Average) -> float:
        """What was expected counts as one observation."""
        if average.num_observed and self._num_observed - average.observed_at > STALE_AFTER:
            return STALE_WEIGHT
        return max(NEW_WEIGHT, 1 / (average.num_observed + 2))


class ObservedCosts:
    """Seconds of a call as far as is known: the profile's times a factor for (lane, kind, bucket).

    A bucket that was never observed takes the factor of the lane's nearest one that was, of the
    same kind: what slows one call down slows the others down too.
    """

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile
        self._factors = Factors()
        self._observed: dict[tuple[str, str], set[int]] = {}

    def seconds(self, lane: str, kind: str, num_rows: int) -> float:
        measured = self.profile.lanes[lane].seconds(kind, num_rows)
        return measured * self.factor(lane, kind, bucket_of(num_rows))

    def factor(self, lane: str, kind: str, bucket: int) -> float:
        known = self._factors.get((lane, kind, bucket))
        if known is not None:
            return known
        buckets = self._observed.get((lane, kind))
        if not buckets:
            return 1.0
        nearest = min(buckets, key=lambda b: max(b / bucket, bucket / b))
        return self._factors.get((lane, kind, nearest)) or 1.0

    def observe(self, lane: str, kind: str, num_rows: int, seconds: float) -> None:
        """One call of a kind of segment over `num_rows` rows took so long."""
        bucket = bucket_of(num_rows)
        ratio = seconds / self.profile.lanes[lane].seconds(kind, num_rows)
        self._factors.observe((lane, kind, bucket), ratio, self.factor(lane, kind, bucket))
        self._observed.setdefault((lane, kind), set()).add(bucket)


HYSTERESIS = 0.1
"""Another choice must be this much cheaper before it is taken."""

EXPLORE_EVERY = 200
MAX_EXPLORED = 0.01
"""Of all estimated time may be spent on trying what looks dearer."""


TRIED_UP_TO = 2.0
"""What is estimated to cost more than this many times the best is not tried at the beginning."""


@dataclass(slots=True)
class _Standing:
    """What was chosen for one question, and the account of trying others."""

    choice: int
    trials: Counter[int] = field(default_factory=Counter)
    num_asked: int = 0
    next_tried: int = 0
    spent_s: float = 0.0
    explored_s: float = 0.0


class StickyChoice:
    """The cheapest of some alternatives, question by question, with hysteresis and exploration.

    At the beginning each of them is taken `num_trials` times, if it is not much dearer: estimates
    that nothing has confirmed may be wrong. Later one of the others is tried now and then: its
    cost may have fallen since it was last observed.
    """

    def __init__(self, num_trials: int = 0) -> None:
        self._num_trials = num_trials
        self._standings: dict[Hashable, _Standing] = {}

    def choose(self, question: Hashable, costs: Sequence[float]) -> int:
        """An index of `costs`. The same question always has the same alternatives."""
        best = min(range(len(costs)), key=costs.__getitem__)
        standing = self._standings.setdefault(question, _Standing(best))
        if costs[best] < costs[standing.choice] * (1 - HYSTERESIS):
            standing.choice = best
        standing.num_asked += 1
        standing.spent_s += costs[standing.choice]
        limit = TRIED_UP_TO * costs[best]
        for i, cost in enumerate(costs):
            if cost <= limit and standing.trials[i] < self._num_trials:
                standing.trials[i] += 1
                return i
        return self._explored(standing, costs)

    def _explored(self, standing: _Standing, costs: Sequence[float]) -> int:
        """The standing choice, or another one whose turn it is and whose price is in the budget."""
        if len(costs) < 2 or standing.num_asked < EXPLORE_EVERY:
            return standing.choice
        others = [i for i in range(len(costs)) if i != standing.choice]
        tried = others[standing.next_tried % len(others)]
        standing.next_tried += 1
        standing.num_asked = 0
        extra_s = max(0.0, costs[tried] - costs[standing.choice])
        if standing.explored_s + extra_s > MAX_EXPLORED * standing.spent_s:
            return standing.choice
        standing.explored_s += extra_s
        return tried
