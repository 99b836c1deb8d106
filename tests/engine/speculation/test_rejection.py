"""Rejection sampling: whatever the draft model believes, the tokens are the model's own."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.kernels.sampling_kernel import accept_or_draw, draw_draft, make_scratch, sample_row
from engine.sampler import DrawnDraft, Sampler, SampleRow
from engine.sampling_params import SamplingParams
from tests.engine.test_sampling_kernel import Filters, assert_chi_square, distribution

pytestmark = pytest.mark.usefixtures("kernels")

MODEL = [2.0, -1.0, 0.5, 0.5, 3.0, -4.0, 0.0, 1.5, 1.4, 1.6, -0.3, 2.2]
NEAR = [1.8, -1.0, 0.7, 0.2, 2.5, -3.0, 0.3, 1.5, 1.6, 1.0, -0.9, 2.6]
FAR = [-3.0, 3.0, 0.0, 0.0, -2.0, 4.0, 1.0, 0.0, 0.0, 0.0, 2.0, -1.0]
NUM_DRAWS = 6000


def draft_of(logits: list[float], filters: Filters, seed: int, position: int) -> DrawnDraft:
    row = np.array(logits, np.float32)
    ids, q = np.zeros(len(row), np.int32), np.zeros(len(row), np.float32)
    drawn: Any = draw_draft
    token, count = drawn(
        row, *astuple(filters), np.uint64(seed), position, make_scratch(len(row)), ids, q
    )
    return DrawnDraft(int(token), ids[:count], q[:count])


def verified(
    logits: list[float], filters: Filters, draft: DrawnDraft, seed: int, position: int
) -> int:
    row = np.array(logits, np.float32)
    arguments = (*astuple(filters), np.uint64(seed), position, make_scratch(len(row)))
    accept: Any = accept_or_draw
    return int(accept(row, *arguments, draft.token_id, draft.ids, draft.probabilities))


def draws(
    model: list[float], guess: list[float], filters: Filters, guess_filters: Filters
) -> tuple[NDArray[np.int64], float]:
    """How often each token came, and the share of the drafts that stood."""
    counts, num_stood = np.zeros(len(model), np.int64), 0
    for position in range(NUM_DRAWS):
        draft = draft_of(guess, guess_filters, 7, position)
        token = verified(model, filters, draft, 7, position)
        counts[token] += 1
        num_stood += token == draft.token_id
    return counts, num_stood / NUM_DRAWS


@pytest.mark.parametrize("guess", [NEAR, FAR, MODEL], ids=["near", "far", "same"])
@pytest.mark.parametrize(
    "filters",
    [Filters(), Filters(0.6), Filters(top_k=4), Filters(top_p=0.8), Filters(1.4, 9, 0.9, 0.05)],
    ids=str,
)
def test_tokens_follow_the_models_distribution(guess: list[float], filters: Filters) -> None:
    counts, share = draws(MODEL, guess, filters, filters)
    p, q = distribution(MODEL, filters), distribution(guess, filters)
    assert_chi_square(counts, NUM_DRAWS * p)
    expected = float(np.minimum(p, q).sum())
    assert abs(share - expected) < 4 * np.sqrt(0.25 / NUM_DRAWS) + 1e-3


@pytest.mark.parametrize(
    "guess_filters", [Filters(top_k=1), Filters(0.3), Filters(top_k=3)], ids=str
)
def test_the_draft_model_may_draw_from_fewer_tokens(guess_filters: Filters) -> None:
    counts, _ = draws(MODEL, NEAR, Filters(), guess_filters)
    assert_chi_square(counts, NUM_DRAWS * distribution(MODEL, Filters()))


def test_a_draft_that_may_not_come_never_does() -> None:
    masked = [*MODEL[:4], -np.inf, *MODEL[5:]]
    counts, _ = draws(masked, MODEL, Filters(), Filters())
    assert counts[4] == 0
    assert_chi_square(counts, NUM_DRAWS * distribution(masked, Filters()))


def test_nothing_of_it_is_correlated_with_a_plain_draw_at_that_position() -> None:
    """The token behind the last draft is drawn plainly, at a position that had drafts before."""
    row = np.array(MODEL, np.float32)
    scratch = make_scratch(len(row))
    pairs = np.zeros((len(MODEL), len(MODEL)))
    plainly: Any = sample_row
    for position in range(NUM_DRAWS):
        draft = draft_of(NEAR, Filters(), 3, position)
        token = verified(MODEL, Filters(), draft, 3, position)
        plain = plainly(row, *astuple(Filters()), np.uint64(3), position, scratch)
        pairs[token, plain] += 1
    p = distribution(MODEL, Filters())
    likely = np.outer(p, p) * NUM_DRAWS > 5
    rest = pairs[~likely].sum()
    counts = np.append(pairs[likely], rest).astype(np.int64)
    expected = np.append(np.outer(p, p)[likely], np.outer(p, p)[~likely].sum())
    assert_chi_square(counts, NUM_DRAWS * expected)


def test_a_nan_gives_no_token() -> None:
    bad = [*MODEL[:-1], float("nan")]
    assert draft_of(bad, Filters(), 1, 1).token_id == -1
    assert verified(bad, Filters(), draft_of(NEAR, Filters(), 1, 1), 1, 1) == -1


@settings(deadline=None, max_examples=200)
@given(
    model=st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=70),
    guess=st.lists(st.floats(-20, 20, width=32), min_size=70, max_size=70),
    filters=st.builds(
        Filters, st.floats(0.05, 4), st.integers(0, 80), st.floats(0.01, 1), st.floats(0, 1)
    ),
    position=st.integers(0, 2**20),
)
def test_what_comes_is_always_a_token_that_may_be_drawn(
    model: list[float], guess: list[float], filters: Filters, position: int
) -> None:
    draft = draft_of(guess[: len(model)], filters, 5, position)
    assert draft.token_id in draft.ids and (np.diff(draft.ids) > 0).all()
    assert np.isclose(draft.probabilities.sum(), 1, atol=1e-5)
    token = verified(model, filters, draft, 5, position)
    wider = Filters(
        filters.temperature,
        filters.top_k,
        min(filters.top_p * 1.0001, 1),
        filters.min_p * 0.9999,
    )
    assert distribution(model, wider, slack=1e-4)[token] > 0


def test_the_sampler_adjusts_the_row_before_it_compares() -> None:
    """A bias, a penalty or a mask changes p, and so what stands."""
    logits = np.array([MODEL], np.float32)
    sure = DrawnDraft(4, np.array([4], np.int32), np.array([1.0], np.float32))
    params = SamplingParams(max_tokens=9, logit_bias=((4, -100.0),), is_seeded=False, logprobs=1)
    sampler = Sampler(len(MODEL))
    for position in range(3, 40):
        row = SampleRow(0, position, params, [0] * position, 1, None, sure)
        (sampled,) = sampler.sample(logits, [row])
        assert sampled.token_id not in (4, None) and sampled.logprobs is not None
    certain = SamplingParams(max_tokens=9, logit_bias=((4, 100.0),), is_seeded=False)
    row = SampleRow(0, 5, certain, [0] * 5, 1, None, sure)
    assert sampler.sample(logits, [row])[0].token_id == 4


def test_rows_with_and_without_drafts_go_together() -> None:
    logits = np.array([MODEL, NEAR, MODEL, FAR], np.float32)
    params = SamplingParams(max_tokens=9, seed=4, is_seeded=False)
    draft = draft_of(NEAR, Filters(), 4, 6)
    rows = [
        SampleRow(0, 6, params, [0] * 6, 1, None, draft),
        SampleRow(1, 7, params, [0] * 7, 1),
        SampleRow(2, 8, SamplingParams(max_tokens=9, temperature=0.0), [0] * 8, 1),
        SampleRow(3, 9, params, [0] * 9, 1),
    ]
    sampler = Sampler(len(MODEL))
    together = sampler.sample(logits, rows)
    assert together == [sampler.sample(logits, [row])[0] for row in rows]
    assert together[2].token_id == 4
