"""Log-probabilities of one sampled (or given) token, as they travel to the client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """`top` holds (token id, logprob) of the most likely tokens, most likely first.

    All are natural logarithms of the softmax of the raw logits (before penalties, bias,
    temperature and masks), so they are finite and at most 0.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
