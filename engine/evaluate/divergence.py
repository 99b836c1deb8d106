"""How far one model's predictions are from another's: the sums behind the figures.

KL is the Kullback-Leibler divergence of the candidate from the reference in nats, top-1 the share
of tokens at which both would choose the same next one, perplexity exp of the mean negative
log-likelihood of the text. All are sums over tokens, so chunks of any size give the same figures.
Knows logits only: no models, no text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
Int32Array = NDArray[np.int32]


@dataclass(slots=True)
class TextScore:
    """The likelihood that one model gives a text. Mutable: chunks are added to it."""

    num_scored: int = 0
    total_nll: float = 0.0

    def add(self, logprobs: Float64Array, next_ids: Int32Array) -> None:
        """`logprobs` [T, V]; `next_ids` [N ≤ T] are the tokens that follow the first N of them."""
        chosen = logprobs[np.arange(len(next_ids)), next_ids]
        self.num_scored += len(next_ids)
        self.total_nll -= float(chosen.sum())

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.total_nll / self.num_scored)) if self.num_scored else float("nan")


@dataclass(slots=True)
class Divergence:
    """Of a candidate from a reference over tokens. Mutable: chunks are added to it."""

    num_tokens: int = 0
    total_kl: float = 0.0
    largest_kl: float = 0.0
    num_agreeing: int = 0

    def add(self, reference: Float64Array, candidate: Float64Array) -> None:
        """Log-probabilities [T, V] of the same tokens."""
        kl = (np.exp(reference) * (reference - candidate)).sum(axis=-1)
        self.num_tokens += len(kl)
        self.total_kl += float(kl.sum())
        self.largest_kl = max(self.largest_kl, float(kl.max(initial=0.0)))
        agreeing = reference.argmax(axis=-1) == candidate.argmax(axis=-1)
        self.num_agreeing += int(np.count_nonzero(agreeing))

    @property
    def mean_kl(self) -> float:
        return self.total_kl / self.num_tokens if self.num_tokens else float("nan")

    @property
    def top_1_agreement(self) -> float:
        return self.num_agreeing / self.num_tokens if self.num_tokens else float("nan")


def log_softmax(logits: Float32Array) -> Float64Array:
    """[T, V] float32 → log-probabilities in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide
