"""Logits to tokens.

For each row, by itself and in this order:
1. the logits are copied if any of 2 to 4 is to change them;
2. repetition, presence and frequency penalties;
3. logit bias;
4. the end tokens are masked while fewer than `min_tokens` exist, and so is what a grammar does not
   allow; where the grammar allows nothing else, the end tokens stay;
5. greedy: the most likely token, the lowest id of equals; otherwise temperature, min_p, top_k,
   top_p and a draw that is a function of (seed, position); against a draft that a draft model has
   drawn, the draw is one of rejection sampling.
Log-probabilities are those of the raw logits, before 2. A row with a NaN gives no token and
harms no other row. Knows nothing of sequences' lives: rows in, tokens out.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from engine.batch import Float32Array, Int32Array
from engine.grammar import GrammarError, TokenMask
from engine.kernels.sampling_kernel import (
    accept_or_draw,
    log_sum_exp,
    make_scratch,
    mask_logits,
    most_likely,
    penalize,
    sample_row,
    sample_rows,
)
from engine.kernels.simd import LANES
from engine.logprobs import TokenLogprobs
from engine.sampling_params import SamplingParams

MIN_PARALLEL_ROWS = 8
_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class DrawnDraft:
    """A draft that a draft model drew, with what it was drawn from.

    `ids` [N] int32, ascending, and `probabilities` [N] float32, which sum to 1.
    """

    token_id: int
    ids: Int32Array
    probabilities: Float32Array


@dataclass(frozen=True, slots=True)
class SampleRow:
    """`row` indexes the logits. `position` is the index the new token will have.

    `token_ids` is everything before it (the first `num_prompt_tokens` are the prompt) and may be
    the sequence's live list: it is read during the call only. `token_mask`: what a grammar allows.
    `draft`: the token is to be drawn by rejection sampling against this.
    """

    row: int
    position: int
    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    token_mask: TokenMask | None = None
    draft: DrawnDraft | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """`token_id` is None when the row's logits held a NaN."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


class Sampler:
    """Scratch memory for one vocabulary. Not thread-safe: one per loop thread.

    Rows whose logits are drawn from as they are share one call of the kernel, on `num_threads`
    threads if they are many.
    """

    def __init__(self, vocab_size: int, num_threads: int = 1) -> None:
        self._vocab_size = vocab_size
        self._adjustable = np.full(-(-vocab_size // LANES) * LANES, -np.inf, np.float32)
        self._counts = np.zeros(vocab_size, np.int32)
        self._scratch = [make_scratch(vocab_size) for _ in range(num_threads)]
        self._helpers = ThreadPoolExecutor(max(1, num_threads - 1), "sampling")

    def sample(self, logits: Float32Array, rows: Sequence[SampleRow]) -> list[Sampled]:
        """`logits` [R, V] float32 is not changed; one result per row asked for."""
        together = [index for index, row in enumerate(rows) if _is_drawn_as_it_is(row)]
        drawn = self._draw(logits, [rows[index] for index in together]) if together else []
        tokens = dict(zip(together, drawn, strict=True))
        results = []
        for index, row in enumerate(rows):
            token = tokens[index] if index in tokens else self._pick(logits[row.row], row)
            results.append(self._with_logprobs(logits[row.row], row, token))
        return results

    def score(self, logits: Float32Array, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        """The raw log-probability of a given token, with the `num_top` most likely ones."""
        return self._logprobs(logits[row], token_id, num_top)

    def _with_logprobs(self, logits: Float32Array, row: SampleRow, token: int | None) -> Sampled:
        if token is None or row.params.logprobs is None:
            return Sampled(token)
        return Sampled(token, self._logprobs(logits, token, row.params.logprobs))

    def _draw(self, logits: Float32Array, rows: Sequence[SampleRow]) -> list[int | None]:
        """One token for each of these rows, none of which needs its logits changed."""
        params = [row.params for row in rows]
        drawn = np.empty(len(rows), np.int64)
        arguments = (
            np.ascontiguousarray(logits),
            np.array([row.row for row in rows], np.int64),
            np.array([each.temperature for each in params], np.float64),
            np.array([each.top_k for each in params], np.int64),
            np.array([each.top_p for each in params], np.float64),
            np.array([each.min_p for each in params], np.float64),
            np.array([each.seed & _SEED_MASK for each in params], np.uint64),
            np.array([row.position for row in rows], np.int64),
        )
        num_parts = len(self._scratch) if len(rows) >= MIN_PARALLEL_ROWS else 1
        others = [
            self._helpers.submit(
                sample_rows, part, num_parts, *arguments, self._scratch[part], drawn
            )
            for part in range(1, num_parts)
        ]
        sample_rows(0, num_parts, *arguments, self._scratch[0], drawn)
        for other in others:
            other.result()
        return [None if token < 0 else token for token in drawn.tolist()]

    def _pick(self, logits: Float32Array, row: SampleRow) -> int | None:
        if row.token_mask is not None or _is_adjusted(row):
            logits = self._adjusted(logits, row)
        params, draft = row.params, row.draft
        if params.is_greedy:
            return _argmax(logits)
        how = (
            params.temperature, params.top_k, params.top_p, params.min_p,
            np.uint64(params.seed & _SEED_MASK), row.position, self._scratch[0],
        )  # fmt: skip
        if draft is None:
            token = sample_row(logits, *how)
        else:
            token = accept_or_draw(logits, *how, draft.token_id, draft.ids, draft.probabilities)
        return None if token < 0 else int(token)

    def _adjusted(self, logits: Float32Array, row: SampleRow) -> Float32Array:
        """The row's logits, changed as its parameters ask, in memory of the sampler."""
        params, scratch = row.params, self._adjustable[: self._vocab_size]
        scratch[:] = logits
        if _is_penalized(params):
            penalize(
                scratch, self._counts, _as_array(row.token_ids), row.num_prompt_tokens,
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
        normalizer = log_sum_exp(logits, self._adjustable)

        def logprob(each: int) -> float:
            return min(float(logits[each]) - normalizer, 0.0)  # in this order a NaN stays one

        top = self._most_likely(logits, num_top) if num_top else []
        return TokenLogprobs(
            token_id, logprob(token_id), tuple((each, logprob(each)) for each in top)
        )

    def _most_likely(self, logits: Float32Array, count: int) -> list[int]:
        """Ids, most likely first, the lowest first of equals."""
        candidates = most_likely(logits, count, self._scratch[0])
        order = np.argsort(-logits[candidates], kind="stable")
        ids: list[int] = candidates[order[:count]].tolist()
        return ids


def _as_array(token_ids: Sequence[int]) -> Int32Array:
    """[N] int32; by way of `array`, which reads a list twice as fast as numpy does."""
    return np.frombuffer(array("i", token_ids), np.int32)


def _is_drawn_as_it_is(row: SampleRow) -> bool:
    return (
        row.token_mask is None
        and row.draft is None
        and not row.params.is_greedy
        and not _is_adjusted(row)
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
