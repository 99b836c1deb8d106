"""Engine and scheduler together: a request's answer does not depend on the company it had.

Every comparison is for equality, of tokens and of logprobs, on the tiny model in every KV format
and on the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.bundle import Bundle
from engine.sampling_params import SamplingParams
from scheduler.messages import FinishReason, GenerationRequest, Priority
from tests.engine_rig import (
    Reply,
    greedy_with_logprobs,
    seeded_with_logprobs,
    serve,
    serve_alone,
)
from tests.loaded_model import LoadedModel, load_model, spoil

TEXT = Path(__file__).parent / "data" / "night_ferry.txt"
SUBJECTS = [
    "tiny-f32-auto",
    "tiny-int8-auto",
    "tiny-int4-auto",
    "tiny-int8-onnxruntime",
    pytest.param("real-int8-auto", marks=pytest.mark.model),
]


@dataclass(frozen=True)
class Subject:
    """A model, tokens to make prompts of, and the answers of requests that ran alone."""

    load: Callable[..., LoadedModel]
    tokens: tuple[int, ...]
    alone: Callable[[GenerationRequest], Reply]

    @property
    def model(self) -> LoadedModel:
        return self.load()

    def prompt(self, start: int, length: int) -> tuple[int, ...]:
        return self.tokens[start : start + length]


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Subject:
    which, kv_format, kernels = request.param.split("-")
    bundle: Bundle = request.getfixturevalue(f"{which}_bundle")
    loaded = cache(
        lambda num_threads: load_model(bundle, kv_format, num_threads, 128, kernels=kernels)
    )

    def load(num_threads: int = 2) -> LoadedModel:
        model = loaded(num_threads)
        spoil(model.cache)
        return model

    tokens = Tokenizer.from_file(str(bundle.tokenizer_path)).encode(TEXT.read_text("utf-8")).ids
    return Subject(load, tuple(tokens), cache(lambda request: serve_alone(load(), request)))


def mixed_requests(subject: Subject) -> list[GenerationRequest]:
    prompt = subject.prompt
    penalized = seeded_with_logprobs(
        14, seed=3, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3
    )
    biased = greedy_with_logprobs(9, logit_bias=((7, 2.5), (11, -100.0)))
    return [
        GenerationRequest("greedy", prompt(0, 90), greedy_with_logprobs(16)),
        GenerationRequest("short", prompt(90, 3), seeded_with_logprobs(20, seed=1)),
        GenerationRequest("penalized", prompt(100, 160), penalized),
        GenerationRequest("scored", prompt(5, 70), greedy_with_logprobs(6), prompt_logprobs=2),
        GenerationRequest("biased", prompt(260, 1), biased),
    ]


def assert_as_if_alone(
    subject: Subject, replies: dict[str, Reply], *who: GenerationRequest
) -> None:
    for request in who:
        assert replies[request.request_id].content == subject.alone(request).content
        assert len(replies[request.request_id].token_ids) == request.sampling.max_tokens


@pytest.mark.parametrize("steps", [(0, 0, 0, 0, 0), (0, 1, 3, 4, 9)])
def test_batched_equals_alone(subject: Subject, steps: tuple[int, ...]) -> None:
    requests = mixed_requests(subject)
    arrivals: dict[int, list[GenerationRequest]] = {step: [] for step in steps}
    for step, request in zip(steps, requests, strict=True):
        arrivals[step].append(request)
    assert_as_if_alone(subject, serve(subject.model, arrivals).replies, *requests)


@pytest.mark.parametrize("num_tokens", [9, 48])
def test_chunked_prefill_equals_whole(subject: Subject, num_tokens: int) -> None:
    requests = mixed_requests(subject)
    run = serve(
        subject.model,
        {0: requests},
        max_num_batched_tokens=num_tokens,
        max_prefill_tokens_with_decodes=num_tokens // 2,
    )
    assert run.num_steps > sum(len(r.prompt_token_ids) for r in requests) // num_tokens
    assert_as_if_alone(subject, run.replies, *requests)


def test_a_prefix_hit_equals_a_miss(subject: Subject) -> None:
    prompt = subject.prompt
    first = GenerationRequest("first", prompt(0, 100), greedy_with_logprobs(12))
    same = replace(first, request_id="same")
    longer = replace(first, request_id="longer", prompt_token_ids=prompt(0, 140))
    branch = replace(
        first,
        request_id="branch",
        prompt_token_ids=prompt(0, 50) + prompt(200, 30),
        sampling=seeded_with_logprobs(12, seed=5),
    )
    run = serve(subject.model, {0: [first], 20: [same, longer, branch]})
    cached = {name: reply.num_cached_tokens for name, reply in run.replies.items()}
    assert cached == {"first": 0, "same": 96, "longer": 96, "branch": 48}
    assert_as_if_alone(subject, run.replies, first, same, longer, branch)


def test_a_conversation_that_goes_on_equals_a_miss(subject: Subject) -> None:
    """Its blocks hold keys that were computed while decoding, one at a time."""
    first = GenerationRequest("first", subject.prompt(0, 60), greedy_with_logprobs(40))
    answer = subject.alone(first).token_ids
    second_prompt = (*first.prompt_token_ids, *answer, *subject.prompt(300, 15))
    second = GenerationRequest("second", second_prompt, greedy_with_logprobs(8))
    run = serve(subject.model, {0: [first], 99: [second]})
    assert run.replies["second"].num_cached_tokens == 96
    assert_as_if_alone(subject, run.replies, first, second)


def test_preempted_equals_undisturbed(subject: Subject) -> None:
    low = [
        GenerationRequest(
            f"low{i}",
            subject.prompt(100 * i, 80 + i),
            seeded_with_logprobs(25, seed=i),
            priority=Priority.LOW,
        )
        for i in range(3)
    ]
    high = [
        GenerationRequest(
            f"high{i}",
            subject.prompt(350 + 60 * i, 60),
            greedy_with_logprobs(8),
            priority=Priority.HIGH,
        )
        for i in range(2)
    ]
    arrivals = {0: low, 6: high[:1], 18: high[1:]}
    run = serve(subject.model, arrivals, num_blocks=22, max_num_batched_tokens=100)
    assert run.stats.total_preemptions >= 2
    assert_as_if_alone(subject, run.replies, *low, *high)


def test_one_thread_equals_two(subject: Subject) -> None:
    requests = mixed_requests(subject)
    run = serve(subject.load(num_threads=1), {0: requests})
    assert_as_if_alone(subject, run.replies, *requests)


def test_resumed_equals_uninterrupted(subject: Subject) -> None:
    for request in mixed_requests(subject)[:3]:
        whole = subject.alone(request)
        resumed = replace(request, resumed_token_ids=tuple(whole.token_ids[:5]))
        rest = serve_alone(subject.model, resumed)
        assert rest.token_ids == whole.token_ids[5:]
        assert rest.logprobs == whole.logprobs[5:]


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(subject: Subject) -> None:
    def sample(name: str, seed: int) -> GenerationRequest:
        sampling = SamplingParams(max_tokens=12, temperature=1.5, seed=seed)
        return GenerationRequest(name, subject.prompt(0, 40), sampling)

    run = serve(subject.model, {0: [sample("a", 1), sample("b", 2)], 3: [sample("c", 1)]})
    a, b, c = (run.replies[name].token_ids for name in "abc")
    assert a == c and a != b


@pytest.mark.parametrize("which", ["tiny", pytest.param("real", marks=pytest.mark.model)])
def test_a_sequence_with_a_nan_fails_and_no_other(
    request: pytest.FixtureRequest, which: str
) -> None:
    bundle: Bundle = request.getfixturevalue(f"{which}_bundle")
    nan_token = bundle.config.vocab_size - 1
    tokens = np.random.default_rng(0).integers(0, nan_token, 80).tolist()
    good = [
        GenerationRequest("greedy", tuple(tokens[:50]), greedy_with_logprobs(10)),
        GenerationRequest("seeded", tuple(tokens[50:]), seeded_with_logprobs(10, seed=1)),
    ]
    bad_tokens = (*tokens[:20], nan_token, *tokens[:20])
    bad = GenerationRequest("bad", bad_tokens, greedy_with_logprobs(10))
    expected = serve(load_model(bundle), {0: good})
    run = serve(load_model(bundle, nan_token=nan_token), {0: [good[0], bad, good[1]]})
    assert run.replies["bad"].finish_reason is FinishReason.ERROR
    assert "NaN" in (run.replies["bad"].error or "")
    assert run.replies["bad"].token_ids == []
    for name, reply in expected.replies.items():
        assert run.replies[name].content == reply.content
