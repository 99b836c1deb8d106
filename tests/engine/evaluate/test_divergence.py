"""The figures, against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine.evaluate.divergence import Divergence, TextScore, log_softmax


def logits(seed: int, rows: int = 10, vocab: int = 7) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 3).astype(np.float32)


def test_log_softmax_is_a_distribution_and_takes_large_logits() -> None:
    logprobs = log_softmax(logits(0) + np.float32(1e4))
    np.testing.assert_allclose(np.exp(logprobs).sum(axis=-1), 1, rtol=1e-12)


def test_a_model_does_not_diverge_from_itself() -> None:
    divergence = Divergence()
    divergence.add(log_softmax(logits(1)), log_softmax(logits(1)))
    assert (divergence.mean_kl, divergence.largest_kl, divergence.top_1_agreement) == (0, 0, 1)


def test_divergence_of_two_coins() -> None:
    divergence = Divergence()
    fair, biased = np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]])
    divergence.add(fair, biased)
    assert divergence.mean_kl == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5))


def test_top_1_counts_where_both_would_choose_the_same() -> None:
    divergence = Divergence()
    reference = log_softmax(np.eye(4, dtype=np.float32) * 9)
    divergence.add(reference, reference[[0, 1, 3, 2]])
    assert divergence.top_1_agreement == 0.5


def test_perplexity_of_a_uniform_model_is_its_vocabulary() -> None:
    score = TextScore()
    score.add(np.full((3, 8), -math.log(8)), np.array([1, 5], np.int32))
    assert score.num_scored == 2
    assert score.perplexity == pytest.approx(8)


def test_chunks_of_any_size_give_the_same_figures() -> None:
    reference, candidate = log_softmax(logits(2)), log_softmax(logits(3))
    following = np.arange(9, dtype=np.int32) % 7
    whole, parts, whole_score, part_score = Divergence(), Divergence(), TextScore(), TextScore()
    whole.add(reference, candidate)
    whole_score.add(candidate, following)
    for start, end in ((0, 1), (1, 6), (6, 10)):
        parts.add(reference[start:end], candidate[start:end])
        part_score.add(candidate[start:end], following[start:end])
    assert parts.mean_kl == pytest.approx(whole.mean_kl, rel=1e-12)
    assert parts.num_agreeing == whole.num_agreeing
    assert parts.largest_kl == whole.largest_kl
    assert part_score.num_scored == 9
    assert part_score.perplexity == pytest.approx(whole_score.perplexity, rel=1e-12)


def test_without_tokens_there_are_no_figures() -> None:
    assert math.isnan(Divergence().mean_kl)
    assert math.isnan(TextScore().perplexity)
