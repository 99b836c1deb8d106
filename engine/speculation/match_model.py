"""What a sequence would say next if it went on repeating itself or a text that was foretold.

The match model of context-mixing compressors (Mahoney 2005), which is prompt lookup (Saxena 2023)
with a memory: a pointer behind the earlier occurrence of the newest tokens moves on with every
token that comes. The longest indexed n-gram wins, of equals the most recent occurrence. After a
token that differs, the pointer stays aligned for a while, since edited copies go on behind the
edit. One token costs constant time: hash tables of n-grams, no scan.

It also learns, by match length, how often the foretold token came, and whether this sequence does
so more or less than others. It learns from every token of the output, whether or not drafts were
made of it, so trying is free. Knows token ids and nothing
else; what a draft is worth is decided in `draft_choice.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from engine.batch import Int32Array

ORDERS = (8, 5, 3, 2)
"""Lengths of the n-grams that are indexed, longest first."""

NUM_CLASSES = 12
"""Classes of matches: 8 by length, then 4 of pointers that were wrong shortly before."""

_PRIOR_RATES = (0.35, 0.5, 0.6, 0.7, 0.85, 0.9, 0.95, 0.97, 0.15, 0.5, 0.7, 0.8)
_PRIOR_WEIGHT = 4.0
_MAX_TRIES = 64.0
_MAX_SHARED_TRIES = 1024.0

# How far a sequence keeps to what others do: hits against those expected, in an extra column.
_TRUST = NUM_CLASSES
_TRUST_WEIGHT = 2.0
_FIRST_TRUST = 0.75
_MAX_EXPECTED = 24.0
_MAX_TRUST = 1.1

_SEPARATOR = -1
_MAX_MATCH = 32
_MAX_MISSES = 3
_NUM_HITS_TO_FORGET = 8
_MIN_MATCH_TO_LEAVE = 3
_FORETOLD_LENGTH = 16

_ORDERS = np.array(ORDERS, np.int64)
_NUM_TOKENS, _POINTER, _LENGTH, _MISSES, _RUN = range(5)  # fields of the state


@numba.njit(nogil=True)
def _class_of(length: Any, misses: Any) -> Any:
    if misses > 0:
        return 8 + (length if length < 2 else 2 if length < 4 else 3)
    if length <= 4:
        return max(0, length - 2)
    if length < 7:
        return 3
    return 4 if length < 10 else 5 if length < 16 else 6 if length < 32 else 7


@numba.njit(nogil=True)
def _bucket(tokens: Any, end: Any, order: Any, mask: Any) -> Any:
    """Where the n-gram that ends before `end` is kept: a multiplicative hash (Knuth 1973)."""
    value = np.uint64(order)
    for i in range(end - order, end):
        value = (value ^ np.uint64(tokens[i])) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
    return np.int64((value >> np.uint64(20)) & np.uint64(mask))


@numba.njit(nogil=True)
def _common_suffix(tokens: Any, a: Any, b: Any) -> int:
    """How many tokens before `a` equal those before `b` (a < b), at most _MAX_MATCH."""
    length = 0
    while length < _MAX_MATCH and length < a:
        token = tokens[a - 1 - length]
        if token < 0 or token != tokens[b - 1 - length]:
            break
        length += 1
    return length


@numba.njit(nogil=True)
def _learn(counts: Any, which: Any, came: Any, limit: Any) -> None:
    counts[0, which] += came
    counts[1, which] += 1
    if counts[1, which] > limit:
        counts[0, which] *= 0.5
        counts[1, which] *= 0.5


@numba.njit(nogil=True)
def _learn_trust(counts: Any, expected: Any, came: Any) -> None:
    counts[0, _TRUST] += came
    counts[1, _TRUST] += expected
    if counts[1, _TRUST] > _MAX_EXPECTED:
        counts[0, _TRUST] *= 0.5
        counts[1, _TRUST] *= 0.5


@numba.njit(nogil=True)
def _follow(tokens: Any, state: Any, token: Any) -> None:
    """Move the pointer behind `token`, which came next."""
    if state[_POINTER] < 0:
        return
    if tokens[state[_POINTER]] == token:
        state[_LENGTH] += 1
        if state[_LENGTH] >= _NUM_HITS_TO_FORGET:
            state[_MISSES] = 0
    else:
        state[_LENGTH] = 0
        state[_MISSES] += 1
    state[_POINTER] += 1
    if state[_MISSES] > _MAX_MISSES or tokens[state[_POINTER]] < 0:
        state[_POINTER], state[_LENGTH], state[_MISSES] = -1, 0, 0


@numba.njit(nogil=True)
def _look_up(tokens: Any, tables: Any, state: Any) -> None:
    """A longer match than the present one, if the tables know any."""
    num_tokens, mask = state[_NUM_TOKENS], tables.shape[1] - 1
    needed = state[_LENGTH] + 1
    if state[_MISSES] > 0:
        needed = max(needed, _MIN_MATCH_TO_LEAVE)
    for which in range(_ORDERS.shape[0]):
        order = _ORDERS[which]
        if state[_RUN] < order:
            continue
        found = tables[which, _bucket(tokens, num_tokens, order, mask)]
        if found == 0 or tokens[found] < 0:
            continue
        length = _common_suffix(tokens, found, num_tokens)
        if length >= max(order, needed):
            state[_POINTER], state[_LENGTH], state[_MISSES] = found, length, 0
            return


@numba.njit(nogil=True)
def _index(tokens: Any, tables: Any, state: Any) -> None:
    """Remember what will come behind the newest tokens: position `num_tokens`."""
    num_tokens, mask = state[_NUM_TOKENS], tables.shape[1] - 1
    for which in range(_ORDERS.shape[0]):
        if state[_RUN] >= _ORDERS[which]:
            tables[which, _bucket(tokens, num_tokens, _ORDERS[which], mask)] = num_tokens


@numba.njit(nogil=True)
def advance(
    tokens: Any, tables: Any, state: Any, counts: Any, shared: Any, new_tokens: Any, num_given: Any
) -> None:
    """Take in tokens. It learns from those behind the first `num_given` of them."""
    for at in range(new_tokens.shape[0]):
        token = new_tokens[at]
        position = state[_NUM_TOKENS]
        pointer = state[_POINTER]
        if at >= num_given and pointer >= 0:
            came = np.float64(tokens[pointer] == token)
            which = _class_of(state[_LENGTH], state[_MISSES])
            _learn_trust(counts, shared[0, which] / shared[1, which], came)
            _learn(counts, which, came, _MAX_TRIES)
            _learn(shared, which, came, _MAX_SHARED_TRIES)
        tokens[position] = token
        state[_NUM_TOKENS] = position + 1
        state[_RUN] = 0 if token < 0 else state[_RUN] + 1
        _follow(tokens, state, token)
        if state[_LENGTH] < _ORDERS[0]:
            _look_up(tokens, tables, state)
        _index(tokens, tables, state)


@numba.njit(nogil=True)
def foretell(tokens: Any, state: Any, counts: Any, shared: Any, out: Any, chances: Any) -> int:
    """The next tokens and the chance of each that it and all before it come. How many there are.

    `out` int32 and `chances` float64 of one size, the latter 0 where there is no token. A copy
    that reaches its own end repeats itself.
    """
    pointer, num_tokens = state[_POINTER], state[_NUM_TOKENS]
    chances[:] = 0
    if pointer < 0:
        return 0
    hits, expected = counts[0, _TRUST], counts[1, _TRUST]
    trust = (hits + _TRUST_WEIGHT * _FIRST_TRUST) / (expected + _TRUST_WEIGHT)
    chance = min(_MAX_TRUST, trust)  # of the match as a whole, hence once
    for i in range(out.shape[0]):
        at = pointer + i
        token = tokens[at] if at < num_tokens else out[at - num_tokens]
        if token < 0:
            return i
        length = state[_LENGTH] + i
        misses = state[_MISSES] if length < _NUM_HITS_TO_FORGET else 0
        which = _class_of(length, misses)
        rate = shared[0, which] / shared[1, which]
        chance *= (counts[0, which] + _PRIOR_WEIGHT * rate) / (counts[1, which] + _PRIOR_WEIGHT)
        out[i] = token
        chances[i] = min(chance, 1.0)
    return int(out.shape[0])


DISPATCHERS = (advance, foretell)
"""What is compiled when first called, for the cache of compiled kernels."""


class MatchStatistics:
    """How often foretold tokens came, over all sequences of an engine: where a new one begins."""

    def __init__(self) -> None:
        rates = np.array(_PRIOR_RATES)
        self.counts = np.stack([rates * 4 * _PRIOR_WEIGHT, np.full(NUM_CLASSES, 4 * _PRIOR_WEIGHT)])


class MatchModel:
    """The memory of one sequence: its tokens and a text that foretells its output, if any.

    `max_tokens` bounds prompt and output together. 4 bytes a token, and 16 to 32 of tables.
    """

    def __init__(
        self,
        max_tokens: int,
        statistics: MatchStatistics,
        foretold: Sequence[int] = (),
    ) -> None:
        capacity = max_tokens + 1 + (len(foretold) + 1 if foretold else 0)
        size = 1 << max(4, (capacity - 1).bit_length())
        self._tokens: Int32Array = np.full(capacity, _SEPARATOR, np.int32)
        self._tables: Int32Array = np.zeros((len(ORDERS), size), np.int32)
        self._state = np.array([0, -1, 0, 0, 0], np.int64)
        self._counts = np.zeros((2, NUM_CLASSES + 1))
        self._shared = statistics.counts
        self._num_extra = 0
        self._is_foretold = bool(foretold)
        if foretold:
            # Position 0 stands for "nothing found" in the tables; no n-gram is that short.
            self._take(np.array([*foretold, _SEPARATOR], np.int32), len(foretold) + 1)
            self._num_extra = len(foretold) + 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence that it has taken in."""
        return int(self._state[_NUM_TOKENS]) - self._num_extra

    def take(self, new_tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """The sequence's next tokens; it learns from those past its `num_prompt_tokens`."""
        num_given = max(0, num_prompt_tokens - self.num_tokens)
        if not self._is_foretold:
            self._take(np.array(new_tokens, np.int32), num_given)
            return
        self._take(np.array(new_tokens[:num_given], np.int32), num_given)
        if self.num_tokens >= num_prompt_tokens:
            self._begin_foretold()
            self._take(np.array(new_tokens[num_given:], np.int32), 0)

    def foretell(self, out: Int32Array, chances: NDArray[np.float64]) -> int:
        """Fills `out` [K] with the tokens that would come next and `chances` [K], falling, with
        the chance that it and all before it come, 0 where there is none; returns how many there
        are, 0 to K."""
        found: int = foretell(self._tokens, self._state, self._counts, self._shared, out, chances)
        return found

    def warm_up(self) -> None:
        """Calls every compiled function once, so that no request waits for a compiler."""
        self.take([1, 2, 1, 2], 2)
        self.foretell(np.zeros(1, np.int32), np.zeros(1))

    def _take(self, new_tokens: Int32Array, num_given: int) -> None:
        advance(
            self._tokens, self._tables, self._state, self._counts, self._shared, new_tokens,
            num_given,
        )  # fmt: skip

    def _begin_foretold(self) -> None:
        """The prompt is complete: the output is expected to begin as the foretold text does."""
        self._is_foretold = False
        self._state[_POINTER], self._state[_LENGTH], self._state[_MISSES] = 0, _FORETOLD_LENGTH, 0
