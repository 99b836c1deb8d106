"""Up to which rate of arrivals a server keeps its objectives. Pure: who is asked is a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

FIRST_RATE, FACTOR, MOST = 0.5, 1.5, 200.0
HELD_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Held:
    """Requests per second: the highest rate that was held (0: not even the first), and the one
    after it, that was not."""

    rate: float
    lost_at: float


def highest_held(kept: Callable[[float], float], first: float = FIRST_RATE) -> Held:
    """Raises the rate by `FACTOR` from `first` until fewer than `HELD_SHARE` of the answers are
    good, or the rate passes `MOST`. `kept`: the share of good answers, 0 to 1, at a rate."""
    held, rate = 0.0, first
    while rate <= MOST and kept(rate) >= HELD_SHARE:
        held, rate = rate, rate * FACTOR
    return Held(held, rate)


def saturating_rate(peers: Mapping[str, Held]) -> float:
    """The lowest rate tried that none of the peers holds."""
    return max(held.lost_at for held in peers.values())
