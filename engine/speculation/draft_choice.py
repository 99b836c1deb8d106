"""How many drafts each sequence of the next step gets: a pure decision from chances and costs.

A draft pays if the tokens it is likely to bring are worth the time that its row adds to the step,
for everybody in it. The measure is proportional fairness (Kelly 1998): the sum over the sequences
of the logarithm of their tokens per second. For one sequence, or many alike, that is throughput;
a sequence without drafts is slowed down only where others gain more, in proportion, than it
loses. Since rows are almost free up to some number (memory-bound steps, padding up to a bucket)
and then are not, every total is tried, not only the first that does not pay.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class RowCosts(Protocol):
    def relative(self, num_tokens: int, num_more: int) -> NDArray[np.float64]:
        """[num_more]: the cost of steps with 1, 2, … more tokens, relative to one without."""
        ...


MIN_GAIN = 0.12
"""Drafts must promise at least this much, in proportion: estimates err, and trying costs too."""


NEVER = 2.0
"""More than any chance."""

_REFRESH_INTERVAL = 64


def least_chance(num_sequences: int, depth: int, max_drafts: int, costs: RowCosts) -> float:
    """The chance that some first draft must have, or no draft at all will be chosen.

    Found by halving, to 1 %: rows in which every draft has the same chance are better than any
    row that begins with it. NEVER if even sure drafts do not pay.
    """

    def is_chosen(chance: float) -> bool:
        chances = np.full((num_sequences, depth), chance)
        return bool(choose_drafts(chances, max_drafts, costs).any())

    if not is_chosen(1.0):
        return NEVER
    low, high = 0.0, 1.0
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if is_chosen(middle) else (middle, high)
    return low


class DraftGate:
    """`least_chance` by number of sequences, remembered for some steps: it has to cost nothing."""

    def __init__(self, depth: int, max_drafts: int, costs: RowCosts) -> None:
        self._depth = depth
        self._max_drafts = max_drafts
        self._costs = costs
        self._known: dict[int, float] = {}
        self._num_asked = 0

    def least_chance(self, num_sequences: int) -> float:
        self._num_asked += 1
        if self._num_asked % _REFRESH_INTERVAL == 0:
            self._known.clear()
        known = self._known.get(num_sequences)
        if known is None:
            known = least_chance(num_sequences, self._depth, self._max_drafts, self._costs)
            self._known[num_sequences] = known
        return known


def choose_drafts(
    chances: NDArray[np.float64], max_drafts: int, costs: RowCosts
) -> NDArray[np.int64]:
    """The number of drafts of each sequence, at most `max_drafts` together.

    `chances` [S, K]: that draft k of sequence s, and all before it, come; falling in k, 0 where
    there is no draft. A step without drafts has S tokens.
    """
    num_sequences, depth = chances.shape
    chosen = np.zeros(num_sequences, np.int64)
    if num_sequences == 0 or depth == 0 or max_drafts <= 0:
        return chosen
    before = np.cumsum(chances, axis=1) - chances + 1  # tokens expected with the drafts before
    gains = np.log1p(chances / before).reshape(-1)
    order = np.argsort(-gains, kind="stable")[:max_drafts]
    order = order[gains[order] > 0]
    losses = num_sequences * np.log(costs.relative(num_sequences, len(order)))
    benefits = np.cumsum(gains[order]) - losses
    if not len(benefits) or benefits.max() < num_sequences * np.log1p(MIN_GAIN):
        return chosen
    taken = order[: int(benefits.argmax()) + 1] // depth
    return chosen + np.bincount(taken, minlength=num_sequences)
