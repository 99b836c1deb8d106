"""Numbers about numbers: percentiles, a median with its spread, and what two spreads say.

Percentiles interpolate linearly between the nearest ranks (Hyndman and Fan's type 7, numpy's
default). Knows no servers and no units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_FOR_QUARTILES = 4
"""With fewer samples, the quartiles say less than the extremes."""


def percentile(values: Sequence[float], share: float) -> float:
    """`share` from 0 to 1. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values, so no percentile")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Spread:
    """What rounds of one figure gave. `low` and `high`: the quartiles, or the extremes where
    there are fewer than `MIN_FOR_QUARTILES` rounds."""

    count: int
    median: float
    q1: float
    q3: float
    minimum: float
    maximum: float

    @property
    def low(self) -> float:
        return self.q1 if self.count >= MIN_FOR_QUARTILES else self.minimum

    @property
    def high(self) -> float:
        return self.q3 if self.count >= MIN_FOR_QUARTILES else self.maximum

    def overlaps(self, other: Spread) -> bool:
        return self.low <= other.high and other.low <= self.high


def spread_of(values: Sequence[float]) -> Spread:
    """Raises ValueError for no values."""
    return Spread(
        len(values),
        *(percentile(values, share) for share in (0.5, 0.25, 0.75, 0.0, 1.0)),
    )


def advantage(ours: float, theirs: float, *, is_lower_better: bool) -> float:
    """How many times better `ours` is: above 1 whatever the figure's direction; infinite where
    the worse one is nothing."""
    better, worse = (theirs, ours) if is_lower_better else (ours, theirs)
    if worse == 0:
        return 1.0 if better == 0 else math.inf
    return better / worse
