"""From a trace of real steps to the facts of a mean step: of those that decode, of those with
prompts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from engine.roofline import Roofline
from engine.span import Category
from server.bench.bench_facts import Cost
from server.bench.explanation import Facts
from server.bench.trace_file import Step, StepKind, TraceFile, read_trace

_WORDS = {StepKind.DECODE: "steps that decode", StepKind.PROMPT: "steps with prompts"}


def trace_facts(document: object, roofline: Roofline | None = None) -> list[Facts]:
    """One for each kind of step that there is. Raises NotATrace."""
    trace = read_trace(document)
    known = trace.about.get("cost") or {}
    cost = Cost(known, str(trace.about.get("kv_format", "")), roofline)
    return [_mean_step(trace, kind, steps, cost) for kind in StepKind if (steps := trace.of(kind))]


def _mean_step(trace: TraceFile, kind: StepKind, steps: Sequence[Step], cost: Cost) -> Facts:
    """Requests wait for a step with a prompt: only there it is a part of what they see."""

    def mean(value: Callable[[Step], float]) -> float:
        return fmean(value(step) for step in steps)

    npu_s = mean(lambda step: step.seconds(Category.NPU_CALL))
    waits_s = [event.seconds for event in trace.queued] if kind is StepKind.PROMPT else []
    return Facts(
        f"the mean of {len(steps)} {_WORDS[kind]}",
        mean(lambda step: step.event.seconds),
        own_s=mean(lambda step: step.seconds(Category.OWN)),
        queue_s=fmean(waits_s) if waits_s else None,
        attention_s=mean(lambda step: step.seconds(Category.ATTENTION)) or None,
        npu_s=npu_s or None,
        num_npu_calls=mean(lambda step: len(step.of(Category.NPU_CALL))),
        **_limits(steps, cost),
    )


def _limits(steps: Sequence[Step], cost: Cost) -> dict[str, Any]:
    names = ("tokens", "rows", "keys", "attended")
    return cost.traced(*(fmean(step.number(name) for step in steps) for name in names))
