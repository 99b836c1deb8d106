"""A real engine under the real scheduler and step loop, in the test's own thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from engine.logprobs import TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.speculation.step_costs import StepCosts
from scheduler.loop import StepLoop
from scheduler.messages import (
    FinishReason,
    GenerationRequest,
    Shutdown,
    StepResult,
    StepStats,
    ToEngine,
    TraceResult,
)
from scheduler.policy import SchedulerConfig
from scheduler.scheduler import Scheduler
from scheduler.worker import ModelWorker, Proposer
from tests.loaded_model import LoadedModel


@dataclass
class Reply:
    """All that one request was told."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0

    @property
    def content(self) -> tuple[object, ...]:
        """What must not depend on the company that the request had."""
        return self.token_ids, self.logprobs, self.prompt_logprobs, self.finish_reason


@dataclass
class Run:
    replies: dict[str, Reply]
    stats: StepStats
    num_steps: int


class _Client:
    """Sends requests as the steps go by, and the `Shutdown` after the last reply."""

    def __init__(self, arrivals: Mapping[int, Sequence[GenerationRequest]]) -> None:
        self.inbox: SimpleQueue[ToEngine] = SimpleQueue()
        self.run = Run({}, StepStats(), 0)
        self._arrivals = dict(arrivals)
        self._send_those_due()

    def receive(self, result: StepResult | TraceResult) -> None:
        assert isinstance(result, StepResult), "no test of this rig traces"
        self.run.stats = result.stats
        self.run.num_steps += 1
        for output in result.outputs:
            reply = self.run.replies[output.request_id]
            reply.token_ids += output.new_token_ids
            reply.logprobs += output.logprobs or ()
            reply.prompt_logprobs = output.prompt_logprobs or reply.prompt_logprobs
            reply.finish_reason, reply.error = output.finish_reason, output.error
            reply.num_cached_tokens = output.num_cached_tokens
        self._send_those_due()

    def _send_those_due(self) -> None:
        is_idle = all(reply.finish_reason for reply in self.run.replies.values())
        due = [step for step in self._arrivals if step <= self.run.num_steps]
        if is_idle and self._arrivals and not due:
            due = [min(self._arrivals)]
        for step in due:
            for request in self._arrivals.pop(step):
                self.run.replies[request.request_id] = Reply()
                self.inbox.put(request)
        if is_idle and not due:
            self.inbox.put(Shutdown())


def serve(
    model: LoadedModel,
    arrivals: Mapping[int, Sequence[GenerationRequest]],
    proposer: Proposer | None = None,
    step_costs: StepCosts | None = None,
    proposer_for: Callable[[Scheduler], Proposer] | None = None,
    **overrides: Any,
) -> Run:
    """Runs requests to their end; `arrivals`: after how many steps which of them come.

    `overrides` are fields of `SchedulerConfig`. `proposer_for`: for proposers that need the rest.
    """
    limits = {
        "max_model_len": model.config.context_length,
        "num_blocks": model.cache.num_blocks,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_logits_rows": 40,
    }
    config = SchedulerConfig(**(limits | overrides))
    scheduler = Scheduler(config, grammars=model.grammars)
    if proposer_for is not None:
        proposer = proposer_for(scheduler)
    worker = ModelWorker(scheduler, model.runner, model.sampler, proposer, step_costs)
    client = _Client(arrivals)
    StepLoop(worker, client.inbox, client.receive).run()
    assert worker.check_invariants() == []
    return client.run


def serve_alone(model: LoadedModel, request: GenerationRequest, **overrides: Any) -> Reply:
    return serve(model, {0: [request]}, **overrides).replies[request.request_id]


def greedy_with_logprobs(max_tokens: int, **changes: Any) -> SamplingParams:
    values: dict[str, Any] = {"temperature": 0.0, "logprobs": 5}
    return SamplingParams(max_tokens=max_tokens, **(values | changes))


def seeded_with_logprobs(max_tokens: int, seed: int, **changes: Any) -> SamplingParams:
    values: dict[str, Any] = {"temperature": 1.2, "top_p": 0.95, "seed": seed}
    return greedy_with_logprobs(max_tokens, **(values | changes))
