from typing import Any

import pytest

from scheduler.messages import GenerationRequest, Priority
from server.errors import ContextExceeded, InvalidRequest
from server.generation import GenerationSpec
from server.protocol import CompletionBody
from server.sampling import RequestOptions, choice_seed, generation_spec
from tests.server.byte_tokenizer import IM_END, VOCAB_SIZE
from tests.server.scripted_client import FakeEngine, saying, served

MODEL = served(FakeEngine(saying("")))


def spec(
    num_prompt_tokens: int = 3, max_tokens: int | None = 4, scope: str = "", **fields: Any
) -> GenerationSpec:
    body = CompletionBody.model_validate({"prompt": "", **fields})
    options = RequestOptions("r", "prompt", max_tokens, cache_scope=scope)
    return generation_spec(body, MODEL, [[97] * num_prompt_tokens], options)


def request(**fields: Any) -> GenerationRequest:
    made = spec(**fields).choices[0].request
    assert made is not None
    return made


def test_choice_zero_keeps_the_seed_and_the_others_differ() -> None:
    seeds = [choice_seed(7, i) for i in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert seeds == [choice_seed(7, i) for i in range(100)]
    assert all(0 <= choice_seed(seed, 3) < 2**63 for seed in (-(2**63), -1, 0, 2**63 - 1))


def test_without_a_seed_every_request_has_its_own() -> None:
    assert request().sampling.seed != request().sampling.seed
    assert request(seed=5).sampling.seed == 5


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers() -> None:
    assert spec(511, 1).choices[0].request is not None
    with pytest.raises(ContextExceeded) as caught:
        spec(512, 1)
    assert caught.value.code == "context_length_exceeded"
    assert "This model's maximum context length is 512 tokens. However," in caught.value.message
    assert "512 tokens, and at least" in caught.value.message


def test_max_tokens_beyond_the_context_is_clamped_and_absent_is_the_rest() -> None:
    assert request(num_prompt_tokens=462, max_tokens=200).sampling.max_tokens == 50
    assert request(num_prompt_tokens=462, max_tokens=None).sampling.max_tokens == 50


@pytest.mark.parametrize(("top_k", "kept"), [(-1, 0), (0, 0), (1, 1), (10**9, VOCAB_SIZE)])
def test_top_k_off_and_huge_are_harmless(top_k: int, kept: int) -> None:
    assert request(top_k=top_k).sampling.top_k == kept


def test_top_p_zero_is_greedy() -> None:
    assert (request(top_p=0).sampling.top_k, request(top_p=0).sampling.top_p) == (1, 1.0)


def test_end_tokens_are_the_models_and_the_requests_or_none_of_the_models() -> None:
    assert request(stop_token_ids=[5, 5]).sampling.stop_token_ids == (IM_END, 5)
    assert request(ignore_eos=True).sampling.stop_token_ids == ()


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, Priority.NORMAL),
        ({"priority": -5}, Priority.HIGH),
        ({"priority": 0}, Priority.NORMAL),
        ({"priority": 3}, Priority.LOW),
        ({"priority": "high"}, Priority.HIGH),
        ({"service_tier": "flex"}, Priority.LOW),
        ({"service_tier": "priority"}, Priority.HIGH),
        ({"service_tier": "flex", "priority": 0}, Priority.NORMAL),
    ],
)
def test_priority_has_three_spellings(fields: dict[str, object], priority: Priority) -> None:
    assert request(**fields).priority is priority


def test_a_chosen_salt_never_reaches_another_keys_scope() -> None:
    salts = [
        request(scope=scope, cache_salt=salt).cache_salt
        for scope in ("", "aa", "bb")
        for salt in (None, "aa", "bb", "aa:", "bb:x")
    ]
    assert salts[0] == ""
    assert len(set(salts)) == len(salts)


@pytest.mark.parametrize(
    "bias",
    [{str(VOCAB_SIZE): 5}, {str(VOCAB_SIZE + 2): 5}, {"-1": 5}, {"abc": 1}, {"5": 101}, {"5": "x"}],
)
def test_a_bad_logit_bias_is_refused(bias: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(logit_bias=bias)
    assert caught.value.param == "logit_bias"


def test_a_good_logit_bias_is_sorted_pairs() -> None:
    assert request(logit_bias={"98": -100, "97": 1}).sampling.logit_bias == (
        (97, 1.0),
        (98, -100.0),
    )


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        request(min_tokens=5)


def test_prompts_times_n_are_bounded() -> None:
    body = CompletionBody.model_validate({"prompt": "", "n": 128})
    with pytest.raises(InvalidRequest, match="at most 1024"):
        generation_spec(body, MODEL, [[97]] * 9, RequestOptions("r", "prompt", 4))
