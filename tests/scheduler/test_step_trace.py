"""A trace of steps: what is in it, when it ends, and that it changes nothing."""

from __future__ import annotations

import logging
import time

import pytest

from engine.span import Category, Span, TracedStep
from scheduler.messages import TraceResult
from scheduler.step_trace import Untraced
from tests.fakes import Rig, ScriptedRunner, make_request, make_rig
from tests.traces import assert_nested

PROMPTS = ([1], [2, 3], [4, 5, 6])


def traced(rig: Rig, num_steps: int = 100) -> list[TraceResult]:
    """The list gets what the trace answers."""
    answers: list[TraceResult] = []
    rig.worker.trace(num_steps, answers.append)
    return answers


def add_three(rig: Rig) -> None:
    for index, prompt in enumerate(PROMPTS):
        rig.worker.add(make_request(f"r{index}", prompt, 5))


def run_traced(rig: Rig, num_steps: int = 100) -> tuple[TracedStep, ...]:
    answers = traced(rig, num_steps)
    add_three(rig)
    rig.run()
    rig.worker.end_trace()
    (answer,) = answers
    return answer.steps


def step_span(step: TracedStep) -> Span:
    return step.spans[0]


def test_outputs_are_the_same_with_and_without_a_trace() -> None:
    plain, recorded = make_rig(), make_rig()
    add_three(plain)
    plain.run()
    run_traced(recorded)
    assert plain.outputs == recorded.outputs
    assert plain.num_steps == recorded.num_steps


def test_a_trace_ends_by_itself_after_its_steps() -> None:
    rig = make_rig()
    steps = run_traced(rig, 2)
    assert [step_span(step).args["number"] for step in steps] == [1, 2]
    assert rig.num_steps > 2
    assert isinstance(rig.worker._tracing, Untraced), "nothing is left of it"


def test_the_phases_of_a_step_fill_it_one_after_another() -> None:
    for step in run_traced(make_rig()):
        whole, *phases = [span for span in step.spans if span.track == "step loop"]
        assert [span.name for span in phases] == [
            "schedule", "build", "execute", "sample", "commit", "propose",
        ]  # fmt: skip
        ends = [whole.start_ns, *(span.end_ns for span in phases)]
        assert ends[:-1] == [span.start_ns for span in phases]
        assert ends[-1] == whole.end_ns
        assert_nested(step.spans)


def test_times_are_those_of_the_clock_that_both_processes_read() -> None:
    before_ns = time.time_ns()
    steps = run_traced(make_rig())
    spans = [step_span(step) for step in steps]
    slack_ns = 50_000_000  # the two clocks of this machine may drift apart a little
    assert before_ns - slack_ns <= spans[0].start_ns
    assert spans[-1].end_ns <= time.time_ns() + slack_ns
    for before, after in zip(spans, spans[1:], strict=False):
        assert before.end_ns <= after.start_ns


def test_a_step_tells_what_it_computes() -> None:
    steps = run_traced(make_rig())
    first, second = (step_span(step).args for step in steps[:2])
    assert (first["sequences"], first["tokens"], first["rows"]) == (3, 6, 3)
    assert (first["decode_tokens"], first["prefill_tokens"]) == (1, 5)
    assert (first["context"], first["keys"], first["attended"]) == (3, 6, 1 + 3 + 6)
    assert (second["decode_tokens"], second["prefill_tokens"]) == (3, 0)
    assert (second["context"], second["keys"], second["attended"]) == (4, 9, 9)


def test_each_request_waits_once_from_its_arrival_to_its_first_step() -> None:
    rig = make_rig(max_num_seqs=2)
    answers = traced(rig)
    for index in range(3):
        rig.worker.add(make_request(f"r{index}", [1, 2, 3], 3, arrival_s=time.time() - index))
    rig.run()
    rig.worker.end_trace()
    steps = answers[0].steps
    waits = {
        span.args["request"]: (number, span)
        for number, step in enumerate(steps)
        for span in step.spans
        if span.category is Category.QUEUE
    }
    assert sorted(waits) == ["r0", "r1", "r2"]
    for index in range(3):
        number, wait = waits[f"r{index}"]
        assert wait.end_ns == step_span(steps[number]).start_ns
        assert (wait.end_ns - wait.start_ns) / 1e9 == pytest.approx(index, abs=0.5)
        assert wait.args["prompt_tokens"] == 3
    assert max(number for number, _ in waits.values()) > 0, "the third had to wait for a seat"


def test_a_step_that_is_tried_again_is_one_step_with_two_executions(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = make_rig(runner=ScriptedRunner(raise_at={1: RuntimeError("hiccup")}))
    with caplog.at_level(logging.CRITICAL):
        steps = run_traced(rig)
    executions = [[s.name for s in step.spans].count("execute") for step in steps]
    assert executions == [1, 2, 1, 1, 1]


def test_a_new_trace_takes_the_place_of_the_one_that_runs() -> None:
    rig = make_rig()
    first = traced(rig)
    add_three(rig)
    rig.step()
    second = traced(rig)
    rig.step()
    rig.worker.end_trace()
    rig.worker.end_trace()
    assert [len(answer.steps) for answer in (*first, *second)] == [1, 1]


def test_a_step_that_computes_nothing_is_none() -> None:
    rig = make_rig()
    answers = traced(rig)
    rig.worker.add(make_request("r", [], 3))
    rig.step()
    rig.worker.end_trace()
    assert answers == [TraceResult(())]
