"""A trace read back: its steps, its facts and verdict, its table, its picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.roofline import Roofline
from engine.span import Category, Span, TracedStep
from server.bench.explanation import Bound, explain
from server.bench.trace_facts import trace_facts
from server.bench.trace_file import Event, NotATrace, Step, StepKind, TraceFile, read_trace
from server.bench.trace_plot import draw_trace, panels_of
from server.bench.trace_summary import summary_table
from server.trace_json import trace_json
from tests.traces import MS, span_in, team_times, traced_step

COST = {
    "weight_bytes": 60_000_000, "layer_operations": 100_000_000, "head_operations": 10_000_000,
    "attention_operations": 1_000, "weight_bits": 4, "kv_bytes_per_token": {"int8": 1_000},
}  # fmt: skip
ABOUT = {"model": "tiny", "device": "cpu", "num_threads": 2, "kv_format": "int8", "cost": COST}
MACHINE = Roofline(2, 1 << 28, 10e9, {(b, r): 1e11 for b in (4, 8) for r in (1, 8, 64)})


def document(*steps: TracedStep, **about: Any) -> Any:
    return json.loads(b"".join(trace_json(steps, ABOUT | about)))


def with_team(number: int, *ticks: list[int], **fields: Any) -> TracedStep:
    """A step whose execution is that of a team; its ticks are those of all 8 ms."""
    start_ns = traced_step(number).spans[0].start_ns + MS
    end_ns = start_ns + 8 * MS
    team = team_times(*ticks, start_ns=start_ns, end_ns=end_ns)
    return TracedStep(traced_step(number, **fields).spans, (team,))


# 4 ms of qkv beside 2 and 2 of waiting, then 1 of attention, then 2 of head and 1 of waiting.
ALONE = [0, 4000, 4000, 5000, 5000, 7000, 8000]
BESIDE = [0, 2000, 4000, 5000, 5000, 7000, 8000]


def traced(*steps: TracedStep, **about: Any) -> TraceFile:
    return read_trace(document(*steps, **about))


def test_threads_that_work_side_by_side_count_as_one() -> None:
    (step,) = traced(with_team(0, ALONE, BESIDE)).steps
    assert step.seconds(Category.ATTENTION) == pytest.approx(0.001)
    assert step.matrix_s == pytest.approx(0.005)
    assert step.seconds(Category.WAIT) == pytest.approx(0.002)
    assert step.phase_s("execute") == pytest.approx(0.008)


def test_a_step_with_one_thread_beside_steps_with_two_is_counted_by_its_own() -> None:
    one, two = traced(with_team(0, ALONE), with_team(1, ALONE, ALONE)).steps
    assert one.matrix_s == pytest.approx(0.006)
    assert two.matrix_s == pytest.approx(0.006)


def test_the_parts_of_a_step_are_those_that_begin_in_it() -> None:
    steps = traced(traced_step(0), traced_step(1), traced_step(2, prefill=9)).steps
    assert [[part.name for part in step.parts] for step in steps] == [
        ["schedule", "execute", "sample"]
    ] * 3
    assert [step.kind for step in steps] == [StepKind.DECODE, StepKind.DECODE, StepKind.PROMPT]


def test_facts_are_of_the_mean_step_of_each_kind() -> None:
    steps = [with_team(0, ALONE, BESIDE, prefill=64, wait_ms=3), with_team(1, ALONE, BESIDE)]
    decode, prompt = trace_facts(document(*steps), MACHINE)
    assert decode.what == "the mean of 1 steps that decode"
    assert decode.step_s == pytest.approx(0.010)
    assert decode.own_s == pytest.approx(0.002)
    assert decode.attention_s == pytest.approx(0.001)
    assert (decode.queue_s, decode.npu_s) == (None, None)
    assert decode.weight_bytes == 60e6 and decode.kv_bytes == 64 * 1000
    assert decode.operations == 110e6 and decode.attention_operations == 64 * 1000
    assert prompt.queue_s == pytest.approx(0.003)
    assert prompt.operations == 64 * 100e6 + 10e6
    assert explain(decode).bound is Bound.BANDWIDTH
    assert explain(prompt).bound is Bound.COMPUTE


def test_without_the_machines_limits_the_bound_inside_the_model_is_unknown() -> None:
    (facts,) = trace_facts(document(with_team(0, ALONE)))
    assert explain(facts).bound is Bound.UNKNOWN
    (facts,) = trace_facts(document(with_team(0, ALONE), cost=None), MACHINE)
    assert explain(facts).bound is Bound.UNKNOWN


def lane_step(number: int, call_ms: float, attention_ms: float) -> TracedStep:
    """Two layers: a segment with its call, and the attention after it."""
    spans: list[Span] = []
    at = 1.0
    for layer in range(2):
        end = at + call_ms
        spans += [
            span_in(number, f"segment {layer}", Category.SEGMENT, "lane npu", at, end, layer=layer),
            span_in(number, "graph", Category.NPU_CALL, "lane npu", at, end, bucket=8, rows=1),
            span_in(number, "attention", Category.ATTENTION, "attention", end,
                    end + attention_ms, layer=layer),
        ]  # fmt: skip
        at = end + attention_ms
    return traced_step(number, *spans)


def test_calls_into_the_npu_and_attention_beside_them_are_told_apart() -> None:
    (busy,) = trace_facts(document(lane_step(0, 3, 1)))
    assert busy.npu_s == pytest.approx(0.006) and busy.num_npu_calls == 2
    assert busy.attention_s == pytest.approx(0.002)
    assert explain(busy).bound is Bound.NPU_CALLS
    (step,) = traced(lane_step(0, 3, 1)).steps
    assert step.matrix_s == pytest.approx(0.006), "a call is a part of its segment"
    (facts,) = trace_facts(document(lane_step(0, 1, 2.9)))
    assert explain(facts).bound is Bound.ATTENTION


def test_steps_that_mostly_do_something_else_are_bound_by_that() -> None:
    more = span_in(0, "propose", Category.OWN, "step loop", 9, 9.9)
    (facts,) = trace_facts(document(traced_step(0, more)))
    assert facts.own_s == pytest.approx(0.0029)
    assert explain(facts).bound is Bound.OVERHEAD


def test_requests_that_wait_longer_than_they_run_are_queueing() -> None:
    (facts,) = trace_facts(document(traced_step(0, prefill=5, wait_ms=40)))
    assert explain(facts).bound is Bound.QUEUEING


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "no traceEvents"),
        ("text", "no traceEvents"),
        ({"traceEvents": [{"ph": "M", "name": "process_name"}]}, "no steps"),
        (
            {"traceEvents": [{"ph": "X", "cat": "qkv", "name": "qkv", "ts": 0, "dur": 1}]},
            "no steps",
        ),
        ({"traceEvents": [3]}, "not those of hexlm trace"),
        ({"traceEvents": [{"ph": "X", "cat": "step", "name": "step", "ts": 0}]}, "not those of"),
    ],
)
def test_what_is_no_trace_is_refused(given: object, reason: str) -> None:
    with pytest.raises(NotATrace, match=reason):
        read_trace(given)


def test_the_table_has_a_column_for_each_kind_and_shares_of_its_step() -> None:
    steps = [with_team(0, ALONE, BESIDE, prefill=64, wait_ms=3), with_team(1, ALONE, BESIDE)]
    table = summary_table(traced(*steps))
    assert table.title == "2 steps of tiny on cpu, 2 threads"
    assert table.columns == ("", "decode", "prompt")
    rows = {label: cells for label, *cells in table.rows}
    assert rows["tokens a step"] == ["1", "64"]
    assert rows["mean step"] == ["10 ms", "10 ms"]
    assert rows["matrices and norms"] == ["5 ms  50.0%", "5 ms  50.0%"]
    assert rows["waiting at barriers"] == ["2 ms  20.0%", "2 ms  20.0%"]
    assert rows["waiting of 1 requests"] == ["", "3 ms"]
    assert "  in NPU calls" not in rows
    assert "rest of the execution" not in rows


def test_the_picture_shows_a_step_of_each_kind_and_a_layer_of_it() -> None:
    steps = [with_team(0, ALONE, BESIDE, prefill=64), *(with_team(n, ALONE) for n in (1, 2, 3))]
    panels = panels_of(traced(*steps))
    assert [panel.title.partition(":")[0] for panel in panels] == [
        "A step that decodes", "Its layer 0", "A step with a prompt", "Its layer 0",
    ]  # fmt: skip
    assert panels[2].rows == ("step loop", "cpu thread 0", "cpu thread 1")
    assert panels[2].seconds == pytest.approx(0.010)
    for panel in panels:
        for bar in panel.bars:
            assert bar.depth == 0, "nothing here lies within anything else"
            assert -1e-9 <= bar.start_s <= bar.start_s + bar.seconds <= panel.seconds + 1e-9


def test_parts_that_follow_each_other_lie_side_by_side_whatever_rounding_does() -> None:
    ends_s = [0.1, 0.1 + 1e-13, 0.3]
    parts = tuple(
        Event(name, Category.OWN, "step loop", start_s, end_s)
        for name, start_s, end_s in [("a", 0.0, ends_s[1]), ("b", ends_s[0], ends_s[2])]
    )
    step = Step(Event("step", Category.STEP, "step loop", 0.0, 0.3), parts)
    (panel,) = panels_of(TraceFile({}, (step,), ()))
    assert [bar.depth for bar in panel.bars] == [0, 0]


def test_calls_are_drawn_within_their_segments() -> None:
    (panel, _) = panels_of(traced(lane_step(0, 3, 1)))
    depths = {bar.label: bar.depth for bar in panel.bars}
    assert (depths["segment 0"], depths["graph"], depths["attention"]) == (0, 1, 0)


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "trace.png"
    draw_trace(traced(with_team(0, ALONE, BESIDE, prefill=64), lane_step(1, 3, 1)), path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 20_000
