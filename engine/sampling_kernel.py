"""The numba side of sampling: one row of logits to one token, without sorting the vocabulary.

All randomness is `uniform(seed, position)`, a hash: no generator state exists anywhere.
Knows numbers only; `sampler.py` decides what to call.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine import simd
from engine.simd import LANES

_NUM_BUCKETS = 4096
_BUCKET_SHIFT = 19  # float32 bits → sign, exponent and 4 bits of mantissa


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


@numba.njit(nogil=True, fastmath={"reassoc"})
def _mass_from(p: Any, threshold: Any) -> float:
    total = np.float64(0)
    for i in range(p.shape[0]):
        total += p[i] if p[i] >= threshold else np.float32(0)
    return total


@numba.njit(nogil=True)
def _fill_histogram(p: Any, maxima: Any, floor: Any, histogram: Any) -> None:
    """Counts and masses of the elements >= floor, by the leading bits of the float."""
    bits = p.view(np.uint32)
    size = p.shape[0] // maxima.shape[0]
    histogram[:] = 0
    for run in range(maxima.shape[0]):
        if maxima[run] >= floor:
            for i in range(run * size, run * size + size):
                if p[i] >= floor:
                    bucket = bits[i] >> np.uint32(_BUCKET_SHIFT)
                    histogram[0, bucket] += 1
                    histogram[1, bucket] += p[i]


@numba.njit(nogil=True)
def _sorted_bucket(p: Any, maxima: Any, floor: Any, bucket: Any, count: Any) -> Any:
    """The elements >= floor in a bucket, ascending."""
    bits = p.view(np.uint32)
    size = p.shape[0] // maxima.shape[0]
    members = np.empty(np.int64(count), np.float32)
    filled = 0
    for run in range(maxima.shape[0]):
        if maxima[run] >= floor:
            for i in range(run * size, run * size + size):
                if p[i] >= floor and bits[i] >> np.uint32(_BUCKET_SHIFT) == bucket:
                    members[filled] = p[i]
                    filled += 1
    members.sort()
    return members


@numba.njit(nogil=True)
def _descend(p: Any, maxima: Any, floor: Any, max_count: Any, max_mass: Any, histogram: Any) -> Any:
    """The largest threshold whose elements number `max_count` or weigh `max_mass`.

    Only one bucket of the histogram is ever sorted. Elements below `floor` do not take part; equal
    elements stand or fall together. `maxima` [V / size] holds the largest element of each run of
    `size`, so that most runs are passed over at one look.
    """
    _fill_histogram(p, maxima, floor, histogram)
    counts, masses = histogram[0], histogram[1]
    count = mass = 0.0
    bucket = _NUM_BUCKETS - 1
    while bucket > 0 and (count + counts[bucket] < max_count and mass + masses[bucket] < max_mass):
        count += counts[bucket]
        mass += masses[bucket]
        bucket -= 1
    if counts[bucket] == 0:
        return floor
    members = _sorted_bucket(p, maxima, floor, bucket, counts[bucket])
    for i in range(members.shape[0] - 1, -1, -1):
        count += 1
        mass += members[i]
        if count >= max_count or mass >= max_mass:
            return members[i]
    return members[0]


@numba.njit(nogil=True)
def _pick(p: Any, threshold: Any, target: Any) -> int:
    """The first id, in id order, where the running mass of elements >= threshold passes target."""
    mass = np.float64(0)
    last = 0
    for start in range(0, p.shape[0], LANES):
        block = p[start : start + LANES]
        block_mass = _mass_from(block, threshold)
        if mass + block_mass <= target:
            mass += block_mass
            continue
        for i in range(LANES):
            if block[i] >= threshold and block[i] > 0:
                mass += block[i]
                last = start + i
                if mass > target:
                    return last
    if last == 0:
        return int(np.argmax(p))
    return last


@numba.njit(nogil=True)
def sample_row(
    p: Any, vocab_size: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any,
    seed: Any, position: Any, maxima: Any, histogram: Any,
) -> int:  # fmt: skip
    """A token, or -1 when there is a NaN. `p` holds the logits and is overwritten.

    `p` [V padded to a multiple of 16] float32, the padding being -inf; `maxima` [V / 16] float32
    and `histogram` [2, 4096] float64 are scratch. Order: temperature, then
    min_p relative to the most likely token, then top_k, then top_p of what those two left.
    Then the inverse of the cumulative distribution, in id order.
    """
    num_vectors = p.shape[0] // LANES
    largest = simd.row_max(p.ctypes.data, num_vectors)
    inverse = np.float32(1.0 / temperature)
    for i in range(p.shape[0]):
        p[i] = (p[i] - largest) * inverse
    total = np.float64(simd.row_exp(p.ctypes.data, num_vectors, np.float32(0)))
    if np.isnan(total):
        return -1
    threshold = np.float32(min_p)
    if 0 < top_k < vocab_size or top_p < 1:
        for run in range(num_vectors):
            maxima[run] = simd.row_max(p.ctypes.data + run * LANES * 4, 1)
    if 0 < top_k < vocab_size:
        floor = threshold
        if top_k < num_vectors:  # k runs have a maximum that is at least this, so k elements have
            floor = max(floor, _descend(maxima, maxima, floor, top_k, np.inf, histogram))
        threshold = max(threshold, _descend(p, maxima, floor, top_k, np.inf, histogram))
    if top_p < 1:
        mass = _mass_from(p, threshold)
        # What lies below this cannot all together weigh 1 - top_p, so the cut is above it.
        floor = max(threshold, np.float32(mass * (1 - top_p) / p.shape[0]))
        threshold = max(threshold, _descend(p, maxima, floor, np.inf, mass * top_p, histogram))
    return _pick(p, threshold, uniform(seed, position) * _mass_from(p, threshold))


@numba.njit(nogil=True)
def log_sum_exp(logits: Any, scratch: Any) -> float:
    """log(sum(exp(logits))); `scratch` as `p` above, its padding -inf."""
    num_vectors = scratch.shape[0] // LANES
    scratch[: logits.shape[0]] = logits
    scratch[logits.shape[0] :] = -np.inf
    largest = simd.row_max(scratch.ctypes.data, num_vectors)
    return largest + np.log(np.float64(simd.row_exp(scratch.ctypes.data, num_vectors, largest)))
