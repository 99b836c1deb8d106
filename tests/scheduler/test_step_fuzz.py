"""Whatever arrives, leaves, fails or is pushed out: everybody gets the text of being alone.

The oracle is `expected_tokens`: a loop of three lines without batches, blocks or scheduler. The
runner checks the content of every slot it reads, and the rig checks all invariants at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from scheduler.messages import FinishReason, GenerationRequest, Priority, StepOutput
from scheduler.sequence import Sequence
from tests.fakes import (
    FakeSampler,
    NextToken,
    Rig,
    ScriptedRunner,
    chain,
    expected_tokens,
    hashed_next_token,
    make_rig,
)

MAX_MODEL_LEN = 40
BLOCK = 4


@dataclass(frozen=True)
class Visit:
    """A request, when it comes, and whether and when its client goes away."""

    request: GenerationRequest
    arrives_at: int
    leaves_at: int | None


@dataclass
class HalfRightProposer:
    """Up to `max_drafts` drafts, some of them wrong, by a rule that needs no state."""

    max_drafts: int

    def propose(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            tokens = list(sequence.token_ids)
            for _ in range(chain(3, len(tokens), sequence.number) % (self.max_drafts + 1)):
                is_wrong = chain(5, len(tokens), sequence.number) % 4 == 0
                tokens.append((hashed_next_token(tuple(tokens)) + is_wrong) % 64)
            sequence.draft_token_ids = tokens[sequence.num_tokens :]


@dataclass(frozen=True)
class Scenario:
    overrides: dict[str, Any]
    visits: list[Visit]
    faults: set[int]
    max_drafts: int
    step_s: float
    has_double_faults: bool = field(init=False)

    def __post_init__(self) -> None:
        doubled = any(number + 1 in self.faults for number in self.faults)
        object.__setattr__(self, "has_double_faults", doubled)


@st.composite
def requests(
    draw: st.DrawFn, index: int, max_tokens_in_pool: int, next_token: NextToken
) -> GenerationRequest:
    """Prompts share long prefixes; none is larger than the pool."""
    limit = min(MAX_MODEL_LEN, max_tokens_in_pool)
    shared = draw(st.sampled_from([[1] * limit, [*range(limit)], []]))
    prompt = shared[: draw(st.integers(0, limit - 1))] + draw(
        st.lists(st.integers(0, 63), min_size=1, max_size=6)
    )
    prompt = prompt[:limit]
    max_tokens = draw(st.integers(0, min(12, limit - len(prompt))))
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=0,
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=index,
        stop_token_ids=draw(st.sampled_from([(), (3, 17, 40), tuple(range(0, 64, 5))])),
        logprobs=draw(st.sampled_from([None, 0, 2])),
    )
    resumed: tuple[int, ...] = ()
    if max_tokens > 2 and draw(st.booleans()):
        alone = GenerationRequest("alone", tuple(prompt), sampling)
        tokens, _ = expected_tokens(alone, MAX_MODEL_LEN, next_token)
        resumed = tuple(tokens[: min(2, len(tokens) - 1)])
    return GenerationRequest(
        f"r{index}",
        tuple(prompt),
        sampling,
        draw(st.sampled_from(list(Priority))),
        cache_salt=draw(st.sampled_from(["", "", "tenant"])),
        resumed_token_ids=resumed,
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
    )


@st.composite
def scenarios(draw: st.DrawFn, next_token: NextToken = hashed_next_token) -> Scenario:
    num_blocks = draw(st.integers(5, 16))
    max_num_seqs = draw(st.integers(1, 5))
    overrides: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "num_blocks": num_blocks,
        "block_size": BLOCK,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + draw(st.integers(1, 20)),
        "max_prefill_tokens_with_decodes": draw(st.integers(1, 16)),
        "max_logits_rows": max_num_seqs + draw(st.integers(0, 8)),
        "enable_prefix_caching": draw(st.integers(0, 4)) > 0,
        "aging_s": draw(st.sampled_from([1.0, 5.0, 1000.0])),
        "max_preemptions": draw(st.integers(1, 3)),
        "token_buckets": draw(st.sampled_from([(), (1, 4, 16)])),
    }
    visits = []
    for index in range(draw(st.integers(1, 9))):
        arrives_at = draw(st.integers(0, 25))
        leaves_after = draw(st.none() | st.none() | st.none() | st.integers(0, 15))
        leaves_at = None if leaves_after is None else arrives_at + leaves_after
        visits.append(
            Visit(draw(requests(index, num_blocks * BLOCK, next_token)), arrives_at, leaves_at)
        )
    faults = draw(st.sets(st.integers(0, 60), max_size=4))
    return Scenario(overrides, visits, faults, draw(st.integers(0, 3)), draw(st.floats(0, 2)))


def play(scenario: Scenario) -> Rig:
    runner = ScriptedRunner(raise_at={n: RuntimeError("injected") for n in scenario.faults})
    proposer = HalfRightProposer(scenario.max_drafts)
    return play_on(make_rig(proposer, runner, **scenario.overrides), scenario)


def play_on(rig: Rig, scenario: Scenario) -> Rig:
    for step in range(5000):
        for visit in scenario.visits:
            if visit.arrives_at == step:
                rig.worker.add(visit.request)
            if visit.leaves_at == step:
                rig.worker.abort(visit.request.request_id)
        if rig.worker.has_work:
            step_with_progress(rig)
        elif step > 25:
            return rig
        rig.clock.now_s += scenario.step_s
    raise AssertionError("not everybody finished")


def step_with_progress(rig: Rig) -> None:
    """Every step computes something, as long as anybody is unfinished."""
    num_unfinished = rig.scheduler.num_running + rig.scheduler.num_waiting
    num_before = rig.runner.num_executed
    rig.step()
    assert (rig.runner.num_executed > num_before) == (num_unfinished > 0)


def check_text(
    scenario: Scenario,
    visit: Visit,
    outputs: list[StepOutput],
    next_token: NextToken = hashed_next_token,
) -> None:
    expected, expected_reason = expected_tokens(visit.request, MAX_MODEL_LEN, next_token)
    tokens = [token for output in outputs for token in output.new_token_ids]
    last = outputs[-1]
    assert all(output.finish_reason is None for output in outputs[:-1])
    may_be_cut = {
        FinishReason.ABORT: visit.leaves_at is not None,
        FinishReason.ERROR: scenario.has_double_faults,
    }
    if last.finish_reason is not None and may_be_cut.get(last.finish_reason):
        assert tokens == expected[: len(tokens)]
    else:
        assert (tokens, last.finish_reason) == (expected, expected_reason)


def check_logprobs(
    request: GenerationRequest,
    outputs: list[StepOutput],
    next_token: NextToken = hashed_next_token,
) -> None:
    """Each token's logprobs are those of its own prefix, however it was computed."""
    tokens = [*request.prompt_token_ids, *request.resumed_token_ids]
    for output in outputs:
        if output.prompt_logprobs is not None:
            scored = [score(tokens[:i], tokens[i], 1, next_token) for i in range(1, len(tokens))]
            num_scored = len(request.prompt_token_ids) - 1
            assert list(output.prompt_logprobs) == [None, *scored[:num_scored]]
        for index, token in enumerate(output.new_token_ids):
            if request.sampling.logprobs is not None:
                assert output.logprobs is not None
                num_top = request.sampling.logprobs
                assert output.logprobs[index] == score(tokens, token, num_top, next_token)
            tokens.append(token)


def score(prefix: list[int], token_id: int, num_top: int, next_token: NextToken) -> object:
    logits = ScriptedRunner(next_token=next_token).logits_of(tuple(prefix))[None]
    return FakeSampler().score(logits, 0, token_id, num_top)


@settings(max_examples=250, deadline=None)
@given(scenarios())
def test_everybody_gets_the_text_of_being_alone_and_no_block_is_lost(scenario: Scenario) -> None:
    rig = play(scenario)
    for visit in scenario.visits:
        outputs = rig.outputs[visit.request.request_id]
        check_text(scenario, visit, outputs)
        check_logprobs(visit.request, outputs)
    assert rig.scheduler.kv.num_free_blocks == rig.scheduler.config.num_blocks
    assert rig.scheduler.check_invariants() == []
