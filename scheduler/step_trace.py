"""A trace of some steps: what each of them did and how long it took, collected and handed over.

`Untraced` is what a worker has otherwise: its clock and two empty functions. Knows what a plan and
a batch tell of a step; what happens inside its execution is told to the recorder by the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.batch import Batch
from engine.span import Argument, Category, Span, TracedStep
from engine.span_recorder import SpanRecorder
from scheduler.messages import StepStats, TraceResult
from scheduler.plan import Plan
from scheduler.sequence import Sequence
from scheduler.stats import PhaseTimer

LOOP_TRACK = "step loop"
QUEUE_TRACK = "queue"


class Tracing(Protocol):
    @property
    def timer(self) -> PhaseTimer: ...

    def built(self, batch: Batch) -> None:
        """What is about to be executed."""
        ...

    def stepped(self, plan: Plan, stats: StepStats) -> None:
        """A step has ended."""
        ...


class Untraced:
    def __init__(self) -> None:
        self.timer = PhaseTimer()

    def built(self, batch: Batch) -> None:
        pass

    def stepped(self, plan: Plan, stats: StepStats) -> None:
        pass


class SpanTimer(PhaseTimer):
    """Every lap is a span, too."""

    def __init__(self, recorder: SpanRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._start_s = self._last_s

    @property
    def start_ns(self) -> int:
        return self._recorder.at_ns(self._start_s)

    @property
    def end_ns(self) -> int:
        """Of the newest lap."""
        return self._recorder.at_ns(self._last_s)

    def start(self) -> None:
        super().start()
        self._start_s = self._last_s

    def lap(self, phase: str) -> float:
        start_ns = self.end_ns
        seconds = super().lap(phase)
        category = Category.EXECUTE if phase == "execute" else Category.OWN
        self._recorder.add(Span(phase, category, LOOP_TRACK, start_ns, self.end_ns))
        return seconds


class StepTrace:
    """Up to `num_steps` steps that compute something; `on_complete` is called with the last."""

    def __init__(
        self, num_steps: int, recorder: SpanRecorder, on_complete: Callable[[], None]
    ) -> None:
        self.timer = SpanTimer(recorder)
        self._num_steps = num_steps
        self._recorder = recorder
        self._on_complete = on_complete
        self._steps: list[TracedStep] = []
        self._context: dict[str, Argument] = {}

    @property
    def result(self) -> TraceResult:
        return TraceResult(tuple(self._steps))

    def built(self, batch: Batch) -> None:
        self._context = {
            "context": int(batch.context_lens.max(initial=0)),
            "keys": int(batch.context_lens.sum()),
            "attended": int(batch.positions.sum()) + batch.num_tokens,
        }

    def stepped(self, plan: Plan, stats: StepStats) -> None:
        inner = self._recorder.take()
        if not plan.sequences:
            return
        start_ns, end_ns = self.timer.start_ns, self.timer.end_ns
        args = {**_plan_args(plan), **self._context, **_device_args(stats, inner)}
        step = Span("step", Category.STEP, LOOP_TRACK, start_ns, end_ns, args)
        queued = [_queue_span(sequence, start_ns) for sequence in plan.admitted]
        self._steps.append(TracedStep((step, *queued, *inner.spans), inner.teams))
        if len(self._steps) >= self._num_steps:
            self._on_complete()


def _plan_args(plan: Plan) -> dict[str, Argument]:
    """A token of a sequence is decoded if all tokens of it in this step are sampled from."""
    pairs = list(zip(plan.num_tokens, plan.num_sample_rows, strict=True))
    decoded = sum(tokens for tokens, rows in pairs if tokens == rows)
    return {
        "sequences": len(plan.sequences),
        "tokens": plan.total_tokens,
        "decode_tokens": decoded,
        "prefill_tokens": plan.total_tokens - decoded,
        "drafts": sum(max(0, rows - 1) for _, rows in pairs),
        "rows": sum(plan.num_sample_rows) + sum(plan.num_prompt_rows),
    }


def _device_args(stats: StepStats, inner: TracedStep) -> dict[str, Argument]:
    calls = [span.args for span in inner.spans if span.category is Category.NPU_CALL]
    args: dict[str, Argument] = {
        "number": stats.total_steps,
        "waiting": stats.num_waiting,
        "devices": ", ".join(stats.devices),
    }
    if calls:
        buckets = sorted({int(call["bucket"]) for call in calls})
        args["npu_calls"] = len(calls)
        args["buckets"] = ", ".join(map(str, buckets))
    return args


def _queue_span(sequence: Sequence, now_ns: int) -> Span:
    """From a request's arrival to the beginning of its first step."""
    arrival_ns = min(now_ns, round(sequence.arrival_s * 1e9))
    args: dict[str, Argument] = {
        "request": sequence.request_id,
        "priority": sequence.request.priority.name.lower(),
        "prompt_tokens": sequence.num_prompt_tokens,
        "cached_tokens": sequence.num_cached_tokens,
    }
    return Span("waiting", Category.QUEUE, QUEUE_TRACK, arrival_ns, now_ns, args)
