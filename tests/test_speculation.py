"""Drafts on a real engine: every answer is equal, to the token and the bit, to the one without.

On the tiny model and on the real one, with n-grams and with a draft model made of the model's own
first layers; with batches, grammars, logprobs, prefix hits, preemption and failures.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.batch import Batch, Float32Array
from engine.bundle import Bundle
from engine.cpu_form import open_cpu_form
from engine.embedding import Embedding
from engine.errors import DeviceError, DoesNotFit
from engine.export.model import load_weights
from engine.kv_cache import PagedKVCache
from engine.loader import EngineConfig, load_engine
from engine.sampling_params import SamplingParams
from engine.speculation.config import SpeculationConfig
from engine.speculation.draft_model import DraftModel
from engine.speculation.vocabulary import common_vocab_size
from scheduler.draft_proposer import DraftModelProposer
from scheduler.messages import GenerationRequest, Priority
from scheduler.ngram_proposer import NgramProposer
from scheduler.proposers import Chain
from scheduler.scheduler import Scheduler
from scheduler.worker import Proposer
from server.structured import json_schema_grammar
from tests.engine_rig import Reply, greedy_with_logprobs, seeded_with_logprobs, serve, serve_alone
from tests.loaded_model import LoadedModel, load_model, spoil
from tests.scheduler.draft_fakes import FreeRows
from tests.truncated_model import truncate_bundle

METHODS = ["ngram", "draft", "auto"]
LINES = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 8}, "b": {"enum": ["left", "right"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class FaultyRunner:
    """The draft model's runner, which raises at some calls."""

    def __init__(self, runner: Any, faults: set[int]) -> None:
        self._runner = runner
        self._faults = faults
        self._number = -1

    def execute(self, batch: Batch) -> Float32Array:
        self._number += 1
        if self._number in self._faults:
            raise DeviceError("injected")
        logits: Float32Array = self._runner.execute(batch)
        return logits


@dataclass(frozen=True)
class Subject:
    """A model, a draft model of its first layer or layers, and answers without any drafts."""

    model: LoadedModel
    draft: DraftModel
    draft_cache: PagedKVCache
    tokens: tuple[int, ...]
    alone: Callable[[GenerationRequest], Reply]

    def fresh(self) -> LoadedModel:
        spoil(self.model.cache)
        spoil(self.draft_cache)
        return self.model

    def run(
        self, arrivals: dict[int, list[GenerationRequest]], method: str, **overrides: Any
    ) -> tuple[dict[str, Reply], int, int]:
        """(the answers, drafts that were checked, drafts that stood)."""

        def proposer(scheduler: Scheduler) -> Proposer:
            ngram = NgramProposer(5, 24, FreeRows())
            draft = DraftModelProposer(self.draft, scheduler.kv, 3, 24, FreeRows())
            both = Chain(ngram, draft)
            methods: dict[str, Proposer] = {"ngram": ngram, "draft": draft, "auto": both}
            return methods[method]

        run = serve(self.fresh(), arrivals, proposer_for=proposer, **overrides)
        return run.replies, run.stats.total_draft_tokens, run.stats.total_accepted_tokens


def load_draft(bundle: Bundle, like: LoadedModel) -> tuple[DraftModel, PagedKVCache]:
    pages = PagedKVCache(bundle.config, like.cache.kv_format, like.cache.num_blocks)
    embedding = Embedding(
        bundle.weights_path, load_weights(bundle.path).embed, bundle.config.embedding_scale
    )
    runner = open_cpu_form(bundle, embedding, pages, like.config.context_length, 256, 40, 1)
    return DraftModel(runner, bundle.config.vocab_size, 256), pages


@pytest.fixture(scope="module", params=["tiny", pytest.param("real", marks=pytest.mark.model)])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    bundle: Bundle = request.getfixturevalue(f"{request.param}_bundle")
    model = load_model(bundle, num_blocks=128)
    folder = tmp_path_factory.mktemp("draft") / "first-layers"
    if bundle.path.stat().st_dev != folder.parent.stat().st_dev:
        bundle = Bundle.open(shutil.copytree(bundle.path, folder.parent / "copy"))
    num_layers = 1 if request.param == "tiny" else bundle.config.num_layers - 4
    draft, pages = load_draft(truncate_bundle(bundle, folder, num_layers), model)
    rng = np.random.default_rng(3)
    tokens = tuple(rng.integers(5, min(bundle.config.vocab_size, 300), 400).tolist())
    return Subject(model, draft, pages, tokens, cache(lambda each: serve_alone(model, each)))


def repetitive(subject: Subject) -> list[GenerationRequest]:
    phrase = subject.tokens[:12]
    prompt = phrase * 4
    penalized = seeded_with_logprobs(18, seed=3, temperature=0.8, repetition_penalty=1.1)
    return [
        GenerationRequest("greedy", prompt, greedy_with_logprobs(24)),
        GenerationRequest("cold", prompt[3:], seeded_with_logprobs(20, seed=1, temperature=0.3)),
        GenerationRequest("hot", prompt[5:], seeded_with_logprobs(20, seed=2, top_p=1.0)),
        GenerationRequest("penalized", prompt, penalized),
        GenerationRequest("scored", prompt[:30], greedy_with_logprobs(8), prompt_logprobs=1),
        GenerationRequest(
            "foretold", subject.tokens[50:80], greedy_with_logprobs(16),
            predicted_token_ids=subject.tokens[100:130],
        ),
    ]  # fmt: skip


def assert_as_without(subject: Subject, replies: dict[str, Reply], requests: list[Any]) -> None:
    for request in requests:
        plain = replace(request, predicted_token_ids=())
        assert replies[request.request_id].content == subject.alone(plain).content


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("steps", [(0,) * 6, (0, 1, 3, 4, 9, 9)])
def test_answers_are_equal_to_those_without_drafts(
    subject: Subject, method: str, steps: tuple[int, ...]
) -> None:
    requests = repetitive(subject)
    arrivals: dict[int, list[GenerationRequest]] = {step: [] for step in steps}
    for step, request in zip(steps, requests, strict=True):
        arrivals[step].append(request)
    replies, num_drafts, num_accepted = subject.run(arrivals, method)
    assert_as_without(subject, replies, requests)
    assert num_drafts > 20 and num_accepted > 0


def test_a_right_prediction_makes_few_steps_of_many_tokens(subject: Subject) -> None:
    plain = GenerationRequest("a", subject.tokens[:40], greedy_with_logprobs(30))
    answer = subject.alone(plain)
    request = replace(plain, predicted_token_ids=tuple(answer.token_ids))
    replies, num_drafts, num_accepted = subject.run({0: [request]}, "ngram")
    assert replies["a"].content == answer.content
    assert num_accepted == num_drafts == 24  # 4 steps with 5, and 4 before the last token
    assert answer.token_ids and len(answer.token_ids) == 30


@pytest.mark.parametrize("method", METHODS)
def test_prefix_hits_and_drafts_go_together(subject: Subject, method: str) -> None:
    first, *others = (
        GenerationRequest(name, subject.tokens[:20] * 4 + tail, greedy_with_logprobs(12))
        for name, tail in (("a", ()), ("b", ()), ("c", subject.tokens[200:210]))
    )
    replies, _, _ = subject.run({0: [first], 20: others}, method)
    assert replies["b"].num_cached_tokens >= 64
    assert_as_without(subject, replies, [first, *others])


@pytest.mark.parametrize("method", METHODS)
def test_preempted_sequences_lose_nothing(subject: Subject, method: str) -> None:
    low = [
        GenerationRequest(
            f"low{i}", subject.tokens[10 * i : 10 * i + 15] * 5,
            seeded_with_logprobs(25, seed=i, temperature=0.4), priority=Priority.LOW,
        )
        for i in range(3)
    ]  # fmt: skip
    high = GenerationRequest(
        "high", subject.tokens[:60], greedy_with_logprobs(8), priority=Priority.HIGH
    )
    replies, _, _ = subject.run({0: low, 6: [high]}, method, num_blocks=22, max_num_seqs=3)
    assert_as_without(subject, replies, [*low, high])


@pytest.mark.parametrize("method", METHODS)
def test_grammars_hold_with_drafts(subject: Subject, method: str) -> None:
    grammar = json_schema_grammar(LINES)
    requests = [
        GenerationRequest(
            f"r{seed}", subject.tokens[:12] * 3, SamplingParams(80, seed=seed, temperature=0.5),
            grammar=grammar,
        )
        for seed in range(3)
    ]  # fmt: skip
    replies, num_drafts, _ = subject.run({0: requests}, method)
    assert_as_without(subject, replies, requests)
    assert num_drafts > 0


def test_unseeded_answers_obey_their_grammar_and_their_logprobs_are_the_models(
    subject: Subject,
) -> None:
    """Rejection sampling draws other tokens, but never one that may not come."""
    grammar = json_schema_grammar({"enum": ["left", "right", "up", "down"]})
    sampling = SamplingParams(40, temperature=1.0, is_seeded=False, logprobs=1)
    requests = [
        GenerationRequest(f"r{i}", subject.tokens[:40], replace(sampling, seed=i), grammar=grammar)
        for i in range(4)
    ]
    free = GenerationRequest("free", subject.tokens[:40], replace(sampling, max_tokens=12, seed=9))
    replies, num_drafts, _ = subject.run({0: [*requests, free]}, "draft")
    assert num_drafts > 0
    for request in requests:
        assert replies[request.request_id].error is None
        assert replies[request.request_id].finish_reason is not None
    answer = replies["free"]
    scoring = GenerationRequest(
        "s", (*free.prompt_token_ids, *answer.token_ids), SamplingParams(0), prompt_logprobs=1
    )
    scored = serve_alone(subject.model, scoring).prompt_logprobs
    assert scored is not None
    assert list(scored[-len(answer.token_ids) :]) == answer.logprobs


def test_a_draft_model_that_fails_changes_no_answer(subject: Subject) -> None:
    runner = subject.draft._runner
    faulty = DraftModel(FaultyRunner(runner, {1, 4, 5, 9}), subject.draft._vocab_size, 256)
    requests = repetitive(subject)
    replies, num_drafts, _ = replace(subject, draft=faulty).run({0: requests}, "draft")
    assert_as_without(subject, replies, requests)
    assert num_drafts > 0


def engine_config(bundle: Bundle, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "device": "cpu", "num_threads": 1, "kv_memory_bytes": 1 << 22, "kv_format": "int8",
        "max_model_len": None, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    }  # fmt: skip
    return EngineConfig(bundle.path, **(values | changes))


def test_the_loader_gives_both_models_the_same_number_of_blocks(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    draft = truncate_bundle(tiny_bundle, tmp_path / "draft", 1)
    tight = 40 * 16 * 400
    speculation = SpeculationConfig(draft_bundle=draft.path)
    with_draft = load_engine(
        engine_config(tiny_bundle, speculation=speculation, kv_memory_bytes=tight), lambda _: None
    )
    without = load_engine(engine_config(tiny_bundle, kv_memory_bytes=tight), lambda _: None)
    assert with_draft.speculation.draft_model is not None
    assert without.speculation.draft_model is None
    assert 0 < with_draft.info.num_blocks < without.info.num_blocks


def test_a_draft_model_with_another_vocabulary_is_refused(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    draft = truncate_bundle(tiny_bundle, tmp_path / "other", 1)
    assert common_vocab_size(tiny_bundle, draft) == tiny_bundle.config.vocab_size
    document = json.loads(draft.tokenizer_path.read_text("utf-8"))
    vocab = document["model"]["vocab"]
    a, b = list(vocab)[10:12]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    draft.tokenizer_path.unlink()
    draft.tokenizer_path.write_text(json.dumps(document), "utf-8")
    with pytest.raises(DoesNotFit, match="other cannot draft for tiny: token 10 is .* instead of"):
        common_vocab_size(tiny_bundle, draft)
    draft.tokenizer_path.write_text("{}", "utf-8")
    with pytest.raises(Exception, match="its tokenizer cannot be read"):
        common_vocab_size(tiny_bundle, draft)
