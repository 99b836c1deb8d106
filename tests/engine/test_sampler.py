"""From logits and parameters to tokens and log-probabilities, by the numbered order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.sampler import Sampled, Sampler, SampleRow
from engine.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("kernels")
VOCAB_SIZE = 50


def random_logits(rows: int = 1, size: int = VOCAB_SIZE, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, size), np.float32) * np.float32(3)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 10} | values))


def sample(
    logits: object,
    sampling: SamplingParams,
    token_ids: Sequence[int] = (1, 2, 3),
    num_prompt_tokens: int = 1,
) -> Sampled:
    values = np.array(logits, np.float32).reshape(1, -1)
    before = values.copy()
    row = SampleRow(0, len(token_ids), sampling, token_ids, num_prompt_tokens)
    (sampled,) = Sampler(values.shape[1]).sample(values, [row])
    assert np.array_equal(values, before, equal_nan=True), "the logits must not change"
    return sampled


def greedy(**values: Any) -> SamplingParams:
    return params(**({"temperature": 0.0} | values))


def test_greedy_takes_the_most_likely_token_and_the_lowest_of_equals() -> None:
    assert sample([0.0, 2.0, -1.0, 2.0], greedy()).token_id == 1
    assert sample([-3.0, -2.0, -2.5], greedy()).token_id == 1
    assert sample([0.0] * 20, greedy()).token_id == 0


@pytest.mark.parametrize(
    "sampling",
    [
        greedy(),
        params(temperature=1e-10),
        params(temperature=1e-6),
        params(temperature=1e-5),
        params(temperature=1e-4),
        params(top_p=1e-6),
        params(top_k=1),
        params(top_k=1, temperature=100.0),
        params(min_p=1.0),
    ],
)
def test_what_amounts_to_greedy_is_greedy(sampling: SamplingParams) -> None:
    for seed in range(20):
        logits = random_logits(seed=seed)
        assert sample(logits, sampling).token_id == int(logits.argmax())


def test_a_tiny_temperature_survives_large_logits() -> None:
    for temperature in (1e-6, 1e-5, 1e-4, 1e-3):
        assert sample([-1e30, 5e4, 4e4, 1e30], params(temperature=temperature)).token_id == 3


def test_the_draw_is_a_function_of_seed_and_position() -> None:
    flat = np.zeros(1000, np.float32)

    def draw(seed: int, length: int) -> int | None:
        return sample(flat, params(seed=seed), [0] * length).token_id

    drawn = {(seed, length): draw(seed, length) for seed in range(12) for length in range(1, 12)}
    assert all(draw(*key) == token for key, token in drawn.items())
    assert len(set(drawn.values())) > 110  # of 132, with 1000 equally likely tokens


def test_the_draw_does_not_depend_on_the_row_or_its_neighbours() -> None:
    logits = random_logits(5)
    sampling = params(seed=3, top_p=0.9, repetition_penalty=1.1, logprobs=4)
    rows = [SampleRow(i, 4 + i, sampling, [*range(4 + i)], 2) for i in range(5)]
    together = Sampler(VOCAB_SIZE).sample(logits, rows)
    sampler = Sampler(VOCAB_SIZE)
    for i in (3, 0, 4, 1, 2):
        moved = SampleRow(0, 4 + i, sampling, [*range(4 + i)], 2)
        assert sampler.sample(logits[i : i + 1], [moved]) == [together[i]]


def test_any_integer_is_a_seed() -> None:
    flat = np.zeros(1000, np.float32)
    seeds = (-1, 0, 2**63, 2**64 - 1, -(2**63))
    drawn = [sample(flat, params(seed=seed)).token_id for seed in seeds]
    assert drawn[0] == drawn[3] and drawn[2] == drawn[4]  # equal in their low 64 bits
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("sampling", [greedy(), params(temperature=0.8, seed=4)])
def test_a_penalty_of_one_is_identical_to_none(sampling: SamplingParams) -> None:
    tokens = [*range(30)]
    for seed in range(10):
        logits = random_logits(seed=seed)
        values = {"temperature": sampling.temperature, "seed": 4, "logprobs": 5}
        off = params(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, **values)
        assert sample(logits, off, tokens) == sample(logits, params(**values), tokens)


def test_a_repetition_penalty_lowers_a_negative_logit() -> None:
    """Token 1 is seen: divided, -1 would become -0.67 and win."""
    assert sample([-5.0, -1.0, -1.2], greedy(repetition_penalty=1.5), [1]).token_id == 2
    assert sample([1.0, 1.2, 0.9], greedy(repetition_penalty=1.5), [1]).token_id == 0


def test_presence_and_frequency_penalties_look_at_the_output() -> None:
    logits = [1.0, 0.9, 0.0]
    in_prompt, in_output = ([0, 0], 2), ([0, 0], 0)
    for penalty in ({"presence_penalty": 0.5}, {"frequency_penalty": 0.1}):
        assert sample(logits, greedy(**penalty), *in_prompt).token_id == 0
        assert sample(logits, greedy(**penalty), *in_output).token_id == 1


def test_bias_moves_and_forbids_tokens() -> None:
    logits = [1.0, 0.5, 0.0]
    assert sample(logits, greedy(logit_bias=((2, 1.5),))).token_id == 2
    assert sample(logits, greedy(logit_bias=((0, -100.0), (1, -100.0)))).token_id == 2
    assert sample(logits, params(logit_bias=((1, 100.0),))).token_id == 1


def test_bias_comes_after_the_penalties() -> None:
    """(2 / 2) + 1 = 2 loses to 2.5; (2 + 1) / 2 would lose too, (2 + 4) / 2 would win."""
    logits = [2.0, 2.5]
    assert sample(logits, greedy(repetition_penalty=2.0, logit_bias=((0, 1.0),)), [0]).token_id == 1
    assert sample(logits, greedy(repetition_penalty=2.0, logit_bias=((0, 1.6),)), [0]).token_id == 0


def test_end_tokens_are_masked_until_enough_tokens_exist() -> None:
    logits = [0.0, 5.0, 4.0, 3.0]
    sampling = greedy(min_tokens=2, stop_token_ids=(1, 2))
    found = [sample(logits, sampling, [0] * (1 + n), 1).token_id for n in range(4)]
    assert found == [3, 3, 1, 1]


def test_end_tokens_are_masked_for_draws_and_even_against_a_bias() -> None:
    sampling = params(min_tokens=1, stop_token_ids=(1,), logit_bias=((1, 100.0),))
    assert {sample([0.0] * 3, sampling, [0] * n, n).token_id for n in range(1, 40)} == {0, 2}


def test_min_tokens_without_end_tokens_changes_nothing() -> None:
    logits = random_logits()
    assert sample(logits, greedy(min_tokens=5)).token_id == int(logits.argmax())


@pytest.mark.parametrize("size", [1, 15, 16, 17, 49, 320])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_every_vocabulary_size_works(size: int, top_p: float) -> None:
    logits = random_logits(size=size)
    sampling = params(top_p=top_p, presence_penalty=0.1, logprobs=1)
    sampled = sample(logits, sampling, [size - 1])
    assert sampled.token_id is not None and 0 <= sampled.token_id < size
    assert sample(logits, greedy(), [0]).token_id == int(logits.argmax())


def float64_logprobs(logits: object) -> NDArray[np.float64]:
    wide = np.array(logits, np.float32).reshape(-1).astype(np.float64)
    shifted = wide - wide.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


@pytest.mark.parametrize("spread", [0.01, 1.0, 20.0])
def test_logprobs_agree_with_float64(spread: float) -> None:
    logits = random_logits(size=3001) * np.float32(spread)
    sampled = sample(logits, params(logprobs=20))
    assert sampled.logprobs is not None and sampled.token_id == sampled.logprobs.token_id
    exact = float64_logprobs(logits)
    assert abs(sampled.logprobs.logprob - exact[sampled.logprobs.token_id]) < 1e-5
    for token, logprob in sampled.logprobs.top:
        assert abs(logprob - exact[token]) < 1e-5


def test_top_logprobs_are_the_most_likely_tokens_in_order() -> None:
    logits = random_logits()
    sampled = sample(logits, greedy(logprobs=7))
    assert sampled.logprobs is not None
    expected = np.argsort(-logits[0], kind="stable")[:7].tolist()
    assert [token for token, _ in sampled.logprobs.top] == expected
    assert sampled.logprobs.top[0] == (sampled.token_id, sampled.logprobs.logprob)


def test_top_logprobs_of_equal_tokens_are_the_lowest_ids() -> None:
    sampled = sample([0.0, 1.0, 0.0, 1.0, 1.0, 0.0], greedy(logprobs=2))
    assert sampled.logprobs is not None
    assert [token for token, _ in sampled.logprobs.top] == [1, 3]
    assert sampled.token_id == 1


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = [1.0, 2.0, 3.0]
    changed = greedy(
        repetition_penalty=2.0,
        logit_bias=((0, 9.0),),
        min_tokens=5,
        stop_token_ids=(2,),
        logprobs=3,
    )
    sampled = sample(logits, changed, [2, 2])
    plain = sample(logits, greedy(logprobs=3))
    assert sampled.token_id == 0 and sampled.logprobs is not None and plain.logprobs is not None
    assert sampled.logprobs.top == plain.logprobs.top
    assert sampled.logprobs.logprob == dict(plain.logprobs.top)[0]


def test_zero_top_logprobs_give_the_tokens_own_only() -> None:
    sampled = sample(random_logits(), greedy(logprobs=0))
    assert sampled.logprobs is not None and sampled.logprobs.top == ()
    assert sample(random_logits(), greedy()).logprobs is None


def test_the_whole_vocabulary_can_be_asked_for_and_sums_to_one() -> None:
    sampled = sample(random_logits(), greedy(logprobs=VOCAB_SIZE))
    assert sampled.logprobs is not None
    values = [logprob for _, logprob in sampled.logprobs.top]
    assert len(values) == VOCAB_SIZE and values == sorted(values, reverse=True)
    assert math.isclose(sum(map(math.exp, values)), 1.0, rel_tol=1e-5)


@pytest.mark.parametrize("logits", [[100.0, 0.0], [3e38, -3e38, 0.0], [-1e4] * 3, [5.0]])
def test_logprobs_are_finite_and_never_above_zero(logits: list[float]) -> None:
    sampled = sample(logits, greedy(logprobs=len(logits)))
    assert sampled.logprobs is not None
    for value in (sampled.logprobs.logprob, *(logprob for _, logprob in sampled.logprobs.top)):
        assert math.isfinite(value) and value <= 0


@pytest.mark.parametrize(
    "sampling",
    [greedy(), greedy(logprobs=3), params(), params(top_k=3, logprobs=2), params(top_p=0.5),
     greedy(presence_penalty=1.0), params(min_p=0.1)],
)  # fmt: skip
@pytest.mark.parametrize("at", [0, 20, VOCAB_SIZE - 1])
def test_a_nan_gives_no_token_and_harms_no_other_row(sampling: SamplingParams, at: int) -> None:
    logits = random_logits(3)
    rows = [SampleRow(i, 3, sampling, [1, 2, 3], 1) for i in range(3)]
    clean = Sampler(VOCAB_SIZE).sample(logits, rows)
    logits[1, at] = np.nan
    found = Sampler(VOCAB_SIZE).sample(logits, rows)
    assert found[1] == Sampled(None)
    assert (found[0], found[2]) == (clean[0], clean[2])


def test_scoring_gives_the_logprob_of_a_given_token() -> None:
    logits = random_logits(2)
    scored = Sampler(VOCAB_SIZE).score(logits, 1, 7, 3)
    assert scored.token_id == 7 and len(scored.top) == 3
    assert abs(scored.logprob - float64_logprobs(logits[1])[7]) < 1e-5


def test_scoring_a_nan_row_says_so() -> None:
    logits = random_logits()
    logits[0, 4] = np.nan
    assert math.isnan(Sampler(VOCAB_SIZE).score(logits, 0, 7, 0).logprob)


def test_no_rows_give_no_tokens() -> None:
    assert Sampler(VOCAB_SIZE).sample(random_logits(), []) == []


def mixed_rows(num_rows: int) -> list[SampleRow]:
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"top_p": 0.9},
        {"top_k": 7},
        {"temperature": 0.0},
        {"min_p": 0.05, "temperature": 1.7},
        {"repetition_penalty": 1.2},
        {"top_p": 0.8, "logprobs": 3},
    )
    return [
        SampleRow(i, 4 + i, params(seed=i % 5, **kinds[i % len(kinds)]), [1] * (4 + i), 2)
        for i in range(num_rows)
    ]


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("num_threads", [2, 3])
def test_many_rows_on_many_threads_are_what_each_is_alone(num_rows: int, num_threads: int) -> None:
    logits = random_logits(num_rows, 1000)
    rows = mixed_rows(num_rows)
    together = Sampler(1000, num_threads).sample(logits, rows)
    alone = Sampler(1000)
    assert together == [alone.sample(logits, [row])[0] for row in rows]
    assert Sampler(1000, num_threads).sample(logits, rows) == together


def test_a_nan_in_a_batch_on_threads_harms_only_its_row() -> None:
    logits = random_logits(16, 200)
    rows = [SampleRow(i, 3, params(seed=i, top_p=0.9), [1, 2, 3], 1) for i in range(16)]
    sampler = Sampler(200, 2)
    clean = sampler.sample(logits, rows)
    logits[5, 17] = np.nan
    found = sampler.sample(logits, rows)
    assert found[5] == Sampled(None)
    assert [f for i, f in enumerate(found) if i != 5] == [c for i, c in enumerate(clean) if i != 5]


def test_logits_that_are_a_part_of_a_larger_array_are_sampled_alike() -> None:
    wide = random_logits(4, 120)
    rows = [SampleRow(i, 3, params(seed=i), [1, 2, 3], 1) for i in range(4)]
    part = wide[:, 10:110]
    assert Sampler(100).sample(part, rows) == Sampler(100).sample(part.copy(), rows)


@pytest.mark.parametrize("size", [50, 64, 65, 1000, 5000])
@pytest.mark.parametrize("count", [1, 5, 20, 50])
def test_top_logprobs_of_any_number_are_the_sorted_ones(size: int, count: int) -> None:
    logits = np.round(random_logits(1, size, seed=count), 1)  # with many equals
    sampled = sample(logits, greedy(logprobs=count))
    assert sampled.logprobs is not None
    expected = np.argsort(-logits[0], kind="stable")[:count].tolist()
    assert [token for token, _ in sampled.logprobs.top] == expected
