"""Logits to tokens, one row at a time.

For each row, in this order:
1. the logits are copied if any of 2 to 4 is to change them;
2. repetition, presence and frequency penalties;
3. logit bias;
4. the end tokens are masked while fewer than `min_tokens` exist, and so is what a grammar does not
   allow; where the grammar allows nothing else, the end tokens stay;
5. greedy: the most likely token, the lowest id of equals; otherwise temperature, min_p, top_k,
   top_p and a draw that is a function of (seed, position).
Log-probabilities are those of the raw logits, before 2. A row with a NaN gives no token and
harms no other row. Knows nothing of sequences' lives: rows in, tokens out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.batch import Float32Array
from engine.grammar import GrammarError, TokenMask
from engine.logprobs import TokenLogprobs
from engine.sampling_kernel import log_sum_exp, mask_logits, penalize, sample_row
from engine.sampling_params import SamplingParams
from engine.simd import LANES

GREEDY_TEMPERATURE = 1e-5
_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SampleRow:
    """`row` indexes the logits. `position` is the index the new token will have.

    `token_ids` is everything before it (the first `num_prompt_tokens` are the prompt) and may be
    the sequence's live list: it is read during the call only. `token_mask`: what a grammar allows.
    """

    row: int
    position: int
    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    token_mask: TokenMask | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """`token_id` is None when the row's logits held a NaN."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


class Sampler:
    """Scratch memory for one vocabulary. Not thread-safe: one per loop thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._scratch = np.full(-(-vocab_size // LANES) * LANES, -np.inf, np.float32)
        self._counts = np.zeros(vocab_size, np.int32)
        self._maxima = np.zeros(len(self._scratch) // LANES, np.float32)
        self._histogram = np.zeros((2, 4096), np.float64)

    def sample(self, logits: Float32Array, rows: Sequence[SampleRow]) -> list[Sampled]:
        """`logits` [R, V] float32 is not changed; one result per row asked for."""
        return [self._sample_one(logits[row.row], row) for row in rows]

    def score(self, logits: Float32Array, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        """The raw log-probability of a given token, with the `num_top` most likely ones."""
        return self._logprobs(logits[row], token_id, num_top)

    def _sample_one(self, logits: Float32Array, row: SampleRow) -> Sampled:
        token = self._pick(logits, row)
        if token is None or row.params.logprobs is None:
            return Sampled(token)
        return Sampled(token, self._logprobs(logits, token, row.params.logprobs))

    def _pick(self, logits: Float32Array, row: SampleRow) -> int | None:
        params = row.params
        greedy = params.temperature < GREEDY_TEMPERATURE or params.top_k == 1
        if greedy and row.token_mask is None and not _is_adjusted(row):
            return _argmax(logits)
        adjusted = self._adjusted(logits, row)
        if greedy:
            return _argmax(adjusted)
        token = sample_row(
            self._scratch, self._vocab_size, params.temperature, params.top_k, params.top_p,
            params.min_p, np.uint64(params.seed & _SEED_MASK), row.position, self._maxima,
            self._histogram,
        )  # fmt: skip
        return None if token < 0 else int(token)

    def _adjusted(self, logits: Float32Array, row: SampleRow) -> Float32Array:
        """The row's logits in scratch, changed as its parameters ask."""
        params, scratch = row.params, self._scratch[: self._vocab_size]
        scratch[:] = logits
        self._scratch[self._vocab_size :] = -np.inf
        if _is_penalized(params):
            penalize(
                scratch, self._counts, np.array(row.token_ids, np.int32), row.num_prompt_tokens,
                np.float32(params.repetition_penalty), np.float32(params.presence_penalty),
                np.float32(params.frequency_penalty),
            )  # fmt: skip
        for token_id, bias in params.logit_bias:
            scratch[token_id] += np.float32(bias)
        stops = list(params.stop_token_ids) if _is_too_short(row) else []
        if row.token_mask is not None:
            _apply_mask(scratch, row.token_mask, stops)
        elif stops:
            scratch[stops] = -np.inf
        return scratch

    def _logprobs(self, logits: Float32Array, token_id: int, num_top: int) -> TokenLogprobs:
        normalizer = log_sum_exp(logits, self._scratch)

        def logprob(each: int) -> float:
            return min(float(logits[each]) - normalizer, 0.0)  # in this order a NaN stays one

        top = _most_likely(logits, num_top) if num_top else []
        return TokenLogprobs(
            token_id, logprob(token_id), tuple((each, logprob(each)) for each in top)
        )


def _apply_mask(logits: Float32Array, token_mask: TokenMask, stops: list[int]) -> None:
    """Only what the mask allows stays; of that, `stops` only if there is nothing else.

    Raises GrammarError if nothing would stay.
    """
    values = logits[stops]
    logits[stops] = -np.inf
    if mask_logits(logits, token_mask):
        return
    logits[stops] = values
    if not mask_logits(logits, token_mask):
        raise GrammarError("the grammar allows no token of the model")


def _is_penalized(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


def _is_too_short(row: SampleRow) -> bool:
    return row.position - row.num_prompt_tokens < row.params.min_tokens


def _is_adjusted(row: SampleRow) -> bool:
    return bool(row.params.logit_bias) or _is_too_short(row) or _is_penalized(row.params)


def _argmax(logits: Float32Array) -> int | None:
    """The first largest, or None if there is a NaN (which numpy's argmax always finds)."""
    token = int(logits.argmax())
    return None if np.isnan(logits[token]) else token


def _most_likely(logits: Float32Array, count: int) -> list[int]:
    """Ids, most likely first, the lowest first of equals."""
    maxima = logits[: len(logits) // LANES * LANES].reshape(-1, LANES).max(axis=1)
    # `count` runs have a maximum that is at least this, so at least `count` ids are candidates.
    least = np.partition(maxima, -count)[-count] if count <= len(maxima) else -np.inf
    candidates = np.flatnonzero(logits >= least)
    order = np.argsort(-logits[candidates], kind="stable")
    ids: list[int] = candidates[order[:count]].tolist()
    return ids
