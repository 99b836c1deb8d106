"""Which matrices deserve 8 bits when not all can have them: the most error saved per bit spent.

Knows numbers only.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Key]):
    """A matrix with its error and its bits per weight in the narrow and in the wide form."""

    key: Key
    num_weights: int
    narrow_error: float
    wide_error: float
    narrow_bits: float
    wide_bits: float

    @property
    def extra_bits(self) -> float:
        return self.num_weights * (self.wide_bits - self.narrow_bits)

    @property
    def saved_per_bit(self) -> float:
        return (self.narrow_error - self.wide_error) / self.extra_bits


def choose_wide(candidates: Sequence[Candidate[Key]], max_bits: float) -> frozenset[Key]:
    """Keys of the matrices to widen, so that the mean bits per weight stay within `max_bits`.

    Greedy: the next best that still fits, in the order of the candidates where they tie.
    """
    num_weights = sum(candidate.num_weights for candidate in candidates)
    spent = sum(candidate.num_weights * candidate.narrow_bits for candidate in candidates)
    chosen = []
    for candidate in sorted(candidates, key=lambda one: -one.saved_per_bit):
        fits = spent + candidate.extra_bits <= max_bits * num_weights
        if fits and candidate.saved_per_bit > 0:
            chosen.append(candidate.key)
            spent += candidate.extra_bits
    return frozenset(chosen)
