"""The numba side of sampling: rows of logits to tokens, without sorting the vocabulary.

All randomness is `uniform(seed, position)`, a hash: no generator state exists anywhere.
Knows numbers only; `sampler.py` decides what to call.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from engine.kernels import simd
from engine.kernels.simd import LANES, RUN

Scratch = tuple[NDArray[Any], ...]

# Draws of rejection sampling must not depend on each other, nor on a plain draw at that position.
_DRAFT_STREAM = np.uint64(0xA0761D6478BD642F)
_ACCEPT_STREAM = np.uint64(0xE7037ED1A0B428DB)
_RESIDUAL_STREAM = np.uint64(0x8EBC6AF09C88C6E3)

_FIRST_SHARE = np.float32(1 / 256)
_NEXT_SHARE = np.float32(1 / 64)
_LEAST_SHARE = np.float32(1e-37)  # the exponential is 0 before that


def make_scratch(vocab_size: int) -> Scratch:
    """Memory for one thread's rows: padding of a row's end, the maximum and the mass of every
    run, and ids, exponentials and a reordered copy of the candidates."""
    num_runs = vocab_size // RUN + 1
    return (
        np.zeros(RUN, np.float32),
        np.zeros(num_runs, np.float32),
        np.zeros(num_runs, np.float32),
        np.zeros(vocab_size, np.int32),
        np.zeros(vocab_size, np.float32),
        np.zeros(max(vocab_size, num_runs), np.float32),
    )


@numba.njit(nogil=True)
def uniform(seed: Any, position: Any) -> float:
    """[0, 1) with 53 bits, from splitmix64's finalizer over seed and position (Steele 2014)."""
    state = np.uint64(seed)
    # The seed is scrambled before the position meets it: their plain XOR would give neighbouring
    # seeds the same draws in another order.
    for word in (np.uint64(0x243F6A8885A308D3), np.uint64(position)):
        state = (state ^ word) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@numba.njit(nogil=True)
def penalize(
    logits: Any, counts: Any, token_ids: Any, num_prompt: Any,
    repetition: Any, presence: Any, frequency: Any,
) -> None:  # fmt: skip
    """In place. `counts` [V] int32 is scratch, all zero before and after.

    Repetition (Keskar et al. 2019) over prompt and output: a seen token's logit always falls,
    whatever its sign. Presence and frequency over the output only, as OpenAI defines them.
    """
    for index in range(len(token_ids)):
        token = token_ids[index]
        if counts[token] == 0 and repetition != 1:
            logits[token] = (
                logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
            )
        counts[token] = 1
    for token in token_ids:
        counts[token] = 0
    if presence == 0 and frequency == 0:
        return
    for index in range(num_prompt, len(token_ids)):
        counts[token_ids[index]] += 1
    for index in range(num_prompt, len(token_ids)):
        token = token_ids[index]
        if counts[token] > 0:
            logits[token] -= presence + frequency * np.float32(counts[token])
            counts[token] = 0


@numba.njit(nogil=True)
def mask_logits(logits: Any, token_mask: Any) -> int:
    """In place: -inf where the bit of `token_mask` is clear. How many tokens are left.

    `token_mask` [>= ceil(V / 32)] int32. Tokens that are -inf already are not counted.
    """
    num_left = 0
    for start in range(0, logits.shape[0], 32):
        word = token_mask[start // 32]
        end = min(start + 32, logits.shape[0])
        if word == 0:
            logits[start:end] = -np.inf
            continue
        for i in range(start, end):
            if (word >> np.int32(i - start)) & np.int32(1) == 0:
                logits[i] = -np.inf
            num_left += logits[i] != -np.inf
    return num_left


@numba.njit(nogil=True)
def _max_of(values: Any, count: Any) -> Any:
    largest = values[0]
    for i in range(1, count):
        largest = max(largest, values[i])
    return largest


@numba.njit(nogil=True)
def _copy(source: Any, out: Any, count: int) -> None:
    """A loop: an assignment to a slice compiles in words for shapes that do not match."""
    for i in range(count):
        out[i] = source[i]


@numba.njit(nogil=True)
def _measure(row: Any, tail: Any, maxima: Any) -> Any:
    """The largest logit, and that of every run of 64 to `maxima`. A NaN counts as +inf.

    The row's last, partial run is copied to `tail` [64] and padded with -inf.
    """
    num_whole = row.shape[0] // RUN
    simd.run_maxima(row.ctypes.data, num_whole, maxima.ctypes.data)
    tail[:] = -np.inf
    _copy(row[num_whole * RUN :], tail, row.shape[0] - num_whole * RUN)
    simd.run_maxima(tail.ctypes.data, 1, maxima.ctypes.data + num_whole * 4)
    return _max_of(maxima, num_whole + 1)


@numba.njit(nogil=True)
def _weigh(row: Any, tail: Any, largest: Any, inverse: Any, masses: Any) -> float:
    """The sum of exp((logit - largest) * inverse); of every run to `masses`."""
    num_whole = row.shape[0] // RUN
    simd.run_masses(row.ctypes.data, num_whole, largest, inverse, masses.ctypes.data)
    simd.run_masses(tail.ctypes.data, 1, largest, inverse, masses.ctypes.data + num_whole * 4)
    total = np.float64(0)
    for run in range(num_whole + 1):
        total += masses[run]
    return total


@numba.njit(nogil=True)
def _cut(values: Any, count: Any, max_count: Any, max_mass: Any) -> Any:
    """The largest threshold whose elements number `max_count` or weigh `max_mass`.

    The smallest element if there is none. Equal elements stand or fall together. Reorders
    `values`: a quickselect (Hoare 1961) whose scale is, if so asked, the mass.
    """
    low, high = 0, count
    num_above, mass_above = 0.0, 0.0
    pivot = values[0]
    while low < high:
        a, b, c = values[low], values[(low + high) // 2], values[high - 1]
        pivot = max(min(a, b), min(max(a, b), c))
        end_above, end_equal, i = low, high, low
        num, mass = num_above, mass_above
        while i < end_equal:  # larger ones to the front, smaller ones to the back
            value = values[i]
            if value > pivot:
                num += 1
                mass += value
                values[i], values[end_above] = values[end_above], value
                end_above += 1
                i += 1
            elif value < pivot:
                end_equal -= 1
                values[i], values[end_equal] = values[end_equal], value
            else:
                i += 1
        if end_above > low and (num >= max_count or mass >= max_mass):
            high = end_above
            continue
        num += end_equal - end_above
        mass += np.float64(pivot) * (end_equal - end_above)
        if num >= max_count or mass >= max_mass:
            return pivot
        num_above, mass_above, low = num, mass, end_equal
    return pivot


@numba.njit(nogil=True)
def _collect(
    row: Any, tail: Any, maxima: Any, floor: Any, largest: Any, inverse: Any, ids: Any, p: Any
) -> int:
    """The tokens whose logit is at least `floor`, in id order, and their exponentials."""
    num_whole = row.shape[0] // RUN
    count = 0
    for run in range(num_whole + 1):
        if maxima[run] < floor:
            continue
        elements = tail if run == num_whole else row[run * RUN : run * RUN + RUN]
        for i in range(RUN):
            if elements[i] >= floor and elements[i] > -np.inf:
                ids[count] = run * RUN + i
                p[count] = simd.exp((elements[i] - largest) * inverse)
                count += 1
    return count


@numba.njit(nogil=True)
def _mass_from(p: Any, count: Any, threshold: Any) -> float:
    mass = np.float64(0)
    for i in range(count):
        if p[i] >= threshold:
            mass += p[i]
    return mass


@numba.njit(nogil=True)
def _pick(ids: Any, p: Any, count: Any, threshold: Any, target: Any) -> int:
    """The first id, in id order, where the running mass of elements >= threshold passes target."""
    mass = np.float64(0)
    last = ids[0]
    for i in range(count):
        if p[i] >= threshold and p[i] > 0:
            mass += p[i]
            last = ids[i]
            if mass > target:
                break
    return int(last)


@numba.njit(nogil=True)
def _pick_from_all(
    row: Any, tail: Any, masses: Any, largest: Any, inverse: Any, target: Any
) -> int:
    """`_pick` without a threshold: only the run that the target lies in is looked into."""
    num_whole = row.shape[0] // RUN
    reached, before, chosen = np.float64(0), np.float64(0), 0
    for run in range(num_whole + 1):
        if masses[run] > 0:
            before, chosen = reached, run
            reached += masses[run]
            if reached > target:
                break
    elements = tail if chosen == num_whole else row[chosen * RUN : chosen * RUN + RUN]
    last = 0
    for i in range(RUN):
        p = simd.exp((elements[i] - largest) * inverse)
        if p > 0:
            before += p
            last = i
            if before > target:
                break
    return int(chosen * RUN + last)


@numba.njit(nogil=True)
def _floor(largest: Any, share: Any, temperature: Any) -> Any:
    """A logit below which no token weighs `share` of the largest, rounding included."""
    distance = (np.log(np.float64(share)) - 1e-4) * temperature
    return np.float32(largest + distance - abs(np.float64(largest)) * 1e-6)


@numba.njit(nogil=True)
def _limited(row: Any, largest: Any, temperature: Any, top_k: Any, min_p: Any, scratch: Any) -> Any:
    """What min_p and top_k leave: (number of candidates, threshold, their mass)."""
    tail, maxima, _, ids, p, work = scratch
    num_runs = row.shape[0] // RUN + 1
    is_counted = 0 < top_k < row.shape[0]
    floor, threshold = np.float32(-np.inf), np.float32(min_p)
    if min_p > 0:
        floor = _floor(largest, min_p, temperature)
    if is_counted and top_k <= num_runs:  # k runs have a maximum that is at least this
        _copy(maxima, work, num_runs)
        floor = max(floor, _cut(work, num_runs, np.float64(top_k), np.inf))
    count = _collect(row, tail, maxima, floor, largest, np.float32(1.0 / temperature), ids, p)
    if is_counted and count > top_k:
        _copy(p, work, count)
        threshold = max(threshold, _cut(work, count, np.float64(top_k), np.inf))
    return count, threshold, _mass_from(p, count, threshold)


@numba.njit(nogil=True)
def _heaviest(row: Any, largest: Any, temperature: Any, top_p: Any, scratch: Any) -> Any:
    """Candidates that hold at least `top_p` of all mass: (their number, 0, the mass of all)."""
    tail, maxima, masses, ids, p, _ = scratch
    inverse = np.float32(1.0 / temperature)
    mass = _weigh(row, tail, largest, inverse, masses)
    share, count = _FIRST_SHARE, 0
    while True:
        floor = _floor(largest, share, temperature)
        count = _collect(row, tail, maxima, floor, largest, inverse, ids, p)
        if _mass_from(p, count, np.float32(0)) >= mass * top_p or share < _LEAST_SHARE:
            return count, np.float32(0), mass
        share *= _NEXT_SHARE


@numba.njit(nogil=True)
def sample_row(
    row: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, seed: Any, position: Any,
    scratch: Any,
) -> int:  # fmt: skip
    """A token, or -1 when there is a NaN or nothing to choose from.

    `row` [V] float32, which stays as it is; `scratch` is of `make_scratch`. Order: temperature,
    then min_p relative to the most likely token, then top_k, then top_p of what those two left.
    Then the inverse of the cumulative distribution, in id order.
    """
    tail, maxima, masses, ids, p, work = scratch
    largest = _measure(row, tail, maxima)
    if not np.isfinite(largest):
        return -1
    u = uniform(seed, position)
    is_limited = min_p > 0 or 0 < top_k < row.shape[0]
    if not is_limited and top_p >= 1:
        inverse = np.float32(1.0 / temperature)
        total = _weigh(row, tail, largest, inverse, masses)
        return _pick_from_all(row, tail, masses, largest, inverse, u * total)
    if is_limited:
        count, threshold, mass = _limited(row, largest, temperature, top_k, min_p, scratch)
    else:
        count, threshold, mass = _heaviest(row, largest, temperature, top_p, scratch)
    if top_p < 1:
        _copy(p, work, count)
        threshold = max(threshold, _cut(work, count, np.inf, mass * top_p))
    return _pick(ids, p, count, threshold, u * _mass_from(p, count, threshold))


@numba.njit(nogil=True)
def sample_rows(
    part: Any, num_parts: Any, logits: Any, rows: Any, temperatures: Any, top_ks: Any, top_ps: Any,
    min_ps: Any, seeds: Any, positions: Any, scratch: Any, out: Any,
) -> None:  # fmt: skip
    """`sample_row` for every `num_parts`-th of `rows` [N] of `logits` [R, V], results to `out`."""
    for i in range(part, rows.shape[0], num_parts):
        out[i] = sample_row(
            logits[rows[i]], temperatures[i], top_ks[i], top_ps[i], min_ps[i], seeds[i],
            positions[i], scratch,
        )  # fmt: skip


@numba.njit(nogil=True)
def _candidates(
    row: Any, largest: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, scratch: Any
) -> Any:
    """All tokens that may be drawn, in the scratch: (number of candidates, threshold)."""
    work = scratch[5]
    count, threshold, mass = _limited(row, largest, temperature, top_k, min_p, scratch)
    if top_p < 1:
        _copy(scratch[4], work, count)
        threshold = max(threshold, _cut(work, count, np.inf, mass * top_p))
    return count, threshold


@numba.njit(nogil=True)
def draw_draft(
    row: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, seed: Any, position: Any,
    scratch: Any, ids: Any, q: Any,
) -> Any:  # fmt: skip
    """(A token, how many it was drawn from), or (-1, 0). Those and their probabilities are left
    in `ids` and `q`, which bound their number: of more, the first in id order are taken."""
    largest = _measure(row, scratch[0], scratch[1])
    if not np.isfinite(largest):
        return -1, 0
    count, threshold = _candidates(row, largest, temperature, top_k, top_p, min_p, scratch)
    num_kept, mass = 0, np.float64(0)
    for i in range(count):
        p = scratch[4][i]
        if p >= threshold and num_kept < ids.shape[0]:
            ids[num_kept], q[num_kept] = scratch[3][i], p
            mass += p
            num_kept += 1
    u = uniform(seed ^ _DRAFT_STREAM, position)
    token = _pick(ids, q, num_kept, np.float32(0), u * mass)
    for i in range(num_kept):
        q[i] /= mass
    return token, num_kept


@numba.njit(nogil=True)
def _probability(ids: Any, p: Any, count: Any, token: Any) -> float:
    at = np.searchsorted(ids[:count], token)
    return np.float64(p[at]) if at < count and ids[at] == token else 0.0


@numba.njit(nogil=True)
def accept_or_draw(
    row: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, seed: Any, position: Any,
    scratch: Any, draft: Any, draft_ids: Any, q: Any,
) -> int:  # fmt: skip
    """Rejection sampling (Leviathan et al. 2023; Chen et al. 2023): a token drawn as from the row.

    The token `draft` was drawn from `draft_ids` [N] (ascending) with probabilities `q` [N]. With
    the row's probabilities p it stands with the chance min(1, p / q); otherwise the token comes
    from the positive part of p - q. -1 as in `sample_row`.
    """
    largest = _measure(row, scratch[0], scratch[1])
    if not np.isfinite(largest):
        return -1
    count, threshold = _candidates(row, largest, temperature, top_k, top_p, min_p, scratch)
    ids, p, residual = scratch[3], scratch[4], scratch[5]
    mass = _mass_from(p, count, threshold)
    for i in range(count):
        p[i] = p[i] / mass if p[i] >= threshold else 0
    chance = _probability(draft_ids, q, q.shape[0], draft)
    if uniform(seed ^ _ACCEPT_STREAM, position) * chance < _probability(ids, p, count, draft):
        return int(draft)
    total, at = np.float64(0), 0
    for i in range(count):
        while at < q.shape[0] and draft_ids[at] < ids[i]:
            at += 1
        is_drafted = at < q.shape[0] and draft_ids[at] == ids[i]
        residual[i] = max(np.float32(0), p[i] - q[at] if is_drafted else p[i])
        total += residual[i]
    left = residual if total > 0 else p  # p equals q but for rounding
    u = uniform(seed ^ _RESIDUAL_STREAM, position)
    return _pick(ids, left, count, np.float32(0), u * (total if total > 0 else 1.0))


@numba.njit(nogil=True)
def most_likely(row: Any, wanted: Any, scratch: Any) -> Any:
    """The ids of at least the `wanted` largest logits, in id order. A view of the scratch."""
    tail, maxima, _, ids, p, work = scratch
    num_runs = row.shape[0] // RUN + 1
    _measure(row, tail, maxima)
    floor = np.float32(-np.inf)
    if wanted <= num_runs:
        _copy(maxima, work, num_runs)
        floor = _cut(work, num_runs, np.float64(wanted), np.inf)
    count = 0
    for i in range(row.shape[0]):
        if maxima[i // RUN] >= floor and row[i] >= floor:
            ids[count] = i
            count += 1
    return ids[:count]


@numba.njit(nogil=True)
def log_sum_exp(logits: Any, scratch: Any) -> float:
    """log(sum(exp(logits))); `scratch` as `p` above, its padding -inf."""
    num_vectors = scratch.shape[0] // LANES
    scratch[: logits.shape[0]] = logits
    scratch[logits.shape[0] :] = -np.inf
    largest = simd.row_max(scratch.ctypes.data, num_vectors)
    return largest + np.log(np.float64(simd.row_exp(scratch.ctypes.data, num_vectors, largest)))


DISPATCHERS = (
    penalize, mask_logits, sample_row, sample_rows, draw_draft, accept_or_draw, most_likely,
    log_sum_exp,
)  # fmt: skip
"""What is compiled when first called, for the cache of compiled kernels."""
