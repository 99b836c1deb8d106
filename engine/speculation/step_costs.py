"""What a step costs by its number of tokens, as measured on the steps that were run.

Only ratios matter here: what the rows of drafts add to a step that decodes anyway. Until a size
was seen, the shape of the guess is used, scaled to what was seen nearby. Knows no device: a lane
that pads, or another one that takes over at some size, shows in the times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

_NEW_WEIGHT = 0.15
_FIRST_WEIGHT = 0.5  # of the first step of a size, where others are known
_MAX_SEEN = 30
_NEARNESS = 4.0  # sizes that differ by a tenth count for two thirds in each other's average
_LARGEST_JUMP = 1.5
_MAX_AGE = 2000
_MAX_TRACKED = 512
_FIT_INTERVAL = 200
_TOLERANCE = 0.02  # smaller changes of an average are not worth a new curve


def guessed_cost(num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Relative to one token: a matrix kernel that turns from memory to compute bound at once.

    Measured on a CPU: 0.19 a row by one runtime, 0.3 by our kernels, whose first row is cheaper. A
    guess that is too high is the safe side.
    """
    return np.asarray(1 + 0.3 * (num_tokens - 1), np.float64)


def guess_for(buckets: Sequence[int]) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
    """`guessed_cost` where steps are padded to `buckets` (ascending; none: no padding)."""

    def cost(num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        at = np.searchsorted(buckets, num_tokens)
        padded = np.append(buckets, np.iinfo(np.int64).max)[at]
        return guessed_cost(np.where(at < len(buckets), padded, num_tokens))

    return cost if len(buckets) else guessed_cost


class StepCosts:
    """Moving averages of the seconds of steps, by number of tokens.

    What was not measured for a long time is forgotten, so that one slow step cannot forbid a
    size for ever. `guess`: relative cost by number of tokens, of any unit.
    """

    def __init__(
        self, guess: Callable[[NDArray[np.int64]], NDArray[np.float64]] = guessed_cost
    ) -> None:
        self._guess = guess(np.arange(1, _MAX_TRACKED + 1))
        self._seconds: dict[int, float] = {}
        self._seen_at: dict[int, int] = {}
        self._num_seen: dict[int, int] = {}
        self._fitted: dict[int, float] = {}
        self._num_observed = 0
        self._curve: NDArray[np.float64] | None = None

    @property
    def is_measured(self) -> bool:
        return bool(self._seconds)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` tokens, each of which was sampled from, took so long."""
        if not 1 <= num_tokens <= _MAX_TRACKED or seconds <= 0:
            return
        self._num_observed += 1
        if self._seconds:
            expected = self._seconds.get(num_tokens, self.seconds(num_tokens))
            seconds = min(max(seconds, expected / _LARGEST_JUMP), expected * _LARGEST_JUMP)
            weight = _NEW_WEIGHT if num_tokens in self._seconds else _FIRST_WEIGHT
            seconds = expected + weight * (seconds - expected)
        self._seconds[num_tokens] = seconds
        self._seen_at[num_tokens] = self._num_observed
        self._num_seen[num_tokens] = min(self._num_seen.get(num_tokens, 0) + 1, _MAX_SEEN)
        is_new = abs(seconds / self._fitted.get(num_tokens, np.inf) - 1) > _TOLERANCE
        if is_new or self._num_observed % _FIT_INTERVAL == 0:
            self._curve = None

    def seconds(self, num_tokens: int) -> float:
        """What a step of this size is expected to take; only relative before the first step."""
        return float(self._estimates()[min(num_tokens, _MAX_TRACKED) - 1])

    def relative(self, num_tokens: int, num_more: int) -> NDArray[np.float64]:
        """[num_more]: the cost of steps with 1, 2, … more tokens, relative to one without."""
        curve = self._estimates()
        sizes = np.minimum(np.arange(num_tokens, num_tokens + num_more + 1), _MAX_TRACKED) - 1
        return np.asarray(curve[sizes[1:]] / curve[sizes[0]])

    def _estimates(self) -> NDArray[np.float64]:
        if self._curve is None:
            self._curve = self._fit()
        return self._curve

    def _fit(self) -> NDArray[np.float64]:
        """The guess, bent so that it passes through what was measured. Never falls with the size:
        a step can be computed as part of a larger one."""
        self._forget_old()
        self._fitted = dict(self._seconds)
        if not self._seconds:
            return self._guess
        sizes = np.array(sorted(self._seconds))
        seconds = np.array([self._seconds[int(size)] for size in sizes])
        seconds = np.minimum.accumulate(seconds[::-1])[::-1]
        factors = self._smoothed(sizes, seconds / self._guess[sizes - 1])
        scale = np.interp(np.arange(1, _MAX_TRACKED + 1), sizes, factors)
        return np.maximum.accumulate(self._guess * scale)

    def _smoothed(
        self, sizes: NDArray[np.int64], factors: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Means over sizes nearby. Whoever picks the cheapest of many noisy sizes picks noise."""
        logs = np.log(sizes)
        nearness = np.exp(-_NEARNESS * np.abs(logs[:, None] - logs[None, :]))
        weights = nearness * np.array([self._num_seen[int(size)] for size in sizes])
        return np.asarray(weights @ factors / weights.sum(axis=1))

    def _forget_old(self) -> None:
        oldest = self._num_observed - _MAX_AGE
        for size in [size for size, seen_at in self._seen_at.items() if seen_at < oldest]:
            del self._seconds[size], self._seen_at[size], self._num_seen[size]
