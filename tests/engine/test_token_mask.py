"""A token mask in the sampler: nothing but what it allows is drawn, and logprobs stay raw."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar import GrammarError, TokenMask
from engine.kernels.sampling_kernel import mask_logits
from engine.sampler import Sampled, Sampler, SampleRow
from engine.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("kernels")
VOCAB_SIZE = 75
SAMPLER = Sampler(VOCAB_SIZE)


def mask_of(*token_ids: int) -> TokenMask:
    bits = np.zeros(96, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def sample(mask: TokenMask | None, position: int = 1, seed: int = 0, **values: Any) -> Sampled:
    logits = np.random.default_rng(seed).standard_normal((1, VOCAB_SIZE), np.float32) * 5
    before = logits.copy()
    params = SamplingParams(**({"max_tokens": 9, "seed": position} | values))
    row = SampleRow(0, position, params, [3] * position, 1, mask)
    (sampled,) = SAMPLER.sample(logits, [row])
    assert np.array_equal(logits, before), "the logits must not change"
    return sampled


STYLES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 2.0, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "min_p": 0.3},
    {"temperature": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
    {"temperature": 0.0, "logit_bias": ((0, 100.0), (74, -100.0))},
]


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_every_way_of_sampling_keeps_to_the_mask(style: dict[str, Any]) -> None:
    tokens = {2, 31, 32, 63, 64, 74}
    for position in range(1, 60):
        assert sample(mask_of(*tokens), position, position, **style).token_id in tokens


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_a_single_token_is_forced_however_unlikely(style: dict[str, Any]) -> None:
    for token_id in (0, 31, 32, 74):
        assert sample(mask_of(token_id), **style).token_id == token_id


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_a_mask_of_everything_changes_nothing(style: dict[str, Any]) -> None:
    for position in range(1, 20):
        whole = sample(mask_of(*range(VOCAB_SIZE)), position, **style)
        assert whole == sample(None, position, **style)


def test_logprobs_are_those_of_the_raw_logits_and_finite() -> None:
    (token_id,) = {5}
    masked = sample(mask_of(token_id), logprobs=4, temperature=0.0)
    free = sample(None, logprobs=4, temperature=0.0)
    assert masked.logprobs is not None and free.logprobs is not None
    assert masked.logprobs.token_id == token_id
    assert masked.logprobs.top == free.logprobs.top
    assert math.isfinite(masked.logprobs.logprob) and masked.logprobs.logprob < 0


def test_end_tokens_stay_away_before_min_tokens_while_there_is_another() -> None:
    values: dict[str, Any] = {"min_tokens": 5, "stop_token_ids": (7, 8), "temperature": 0.0}
    assert sample(mask_of(7, 8, 9), logit_bias=((7, 100.0),), **values).token_id == 9
    assert sample(mask_of(7), **values).token_id == 7
    assert sample(mask_of(7, 8), logit_bias=((8, 100.0),), **values).token_id == 8
    assert sample(mask_of(7, 9), position=6, logit_bias=((7, 100.0),), **values).token_id == 7


def test_a_mask_that_allows_nothing_is_an_error() -> None:
    for style in STYLES:
        with pytest.raises(GrammarError, match="allows no token"):
            sample(mask_of(), **style)
    with pytest.raises(GrammarError, match="allows no token"):
        sample(mask_of(80))


def test_a_nan_that_is_allowed_gives_no_token() -> None:
    logits = np.zeros((1, VOCAB_SIZE), np.float32)
    logits[0, 5] = np.nan
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=1, temperature=temperature)
        row = SampleRow(0, 1, params, [1], 1, mask_of(5, 6))
        assert Sampler(VOCAB_SIZE).sample(logits, [row]) == [Sampled(None)]


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, VOCAB_SIZE - 1)), st.sets(st.integers(0, VOCAB_SIZE - 1)))
def test_the_kernel_agrees_with_a_loop(tokens: set[int], gone: set[int]) -> None:
    logits = np.arange(VOCAB_SIZE, dtype=np.float32) - 30
    logits[list(gone)] = -np.inf
    expected = [v if i in tokens else -math.inf for i, v in enumerate(logits.tolist())]
    assert mask_logits(logits, mask_of(*tokens)) == len(tokens - gone)
    assert logits.tolist() == expected
