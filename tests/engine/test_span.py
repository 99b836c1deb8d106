"""Stamps of a team of threads become spans that fit into their step."""

from __future__ import annotations

import pytest

from engine.span import Category, TracedStep, ns_per_tick
from tests.traces import MS, START_NS, assert_nested, team_times, traced_step

FIRST = (0, 100, 150, 300, 300, 900, 1000)
SECOND = (10, 150, 150, 200, 300, 1000, 1000)


def test_phases_and_the_waiting_between_them_fill_the_time_of_each_thread() -> None:
    spans = list(team_times(FIRST, SECOND).spans(1000.0))
    first = [span for span in spans if span.track == "cpu thread 0"]
    assert [(s.name, (s.end_ns - s.start_ns) // 1000) for s in first] == [
        ("qkv", 100), ("wait", 50), ("attention", 150), ("head", 600), ("wait", 100),
    ]  # fmt: skip
    assert [s.category for s in first[:3]] == [Category.MODEL, Category.WAIT, Category.ATTENTION]
    assert [dict(s.args) for s in first[2:4]] == [{"layer": 0}, {}]
    for before, after in zip(first, first[1:], strict=False):
        assert before.end_ns == after.start_ns
    assert max(span.end_ns for span in spans) == START_NS + MS
    assert_nested(spans)


def test_stamps_of_an_earlier_step_are_left_out() -> None:
    """A step without logits stops before the head, whose stamps are those of the step before."""
    ended_early = (1000, 1100, 1150, 1300, 1310, 900, 990)
    team = team_times(ended_early)
    assert team.num_phases == 2 and team.last_tick == 1310
    names = [span.name for span in team.spans(1.0)]
    assert names == ["qkv", "wait", "attention", "wait"]


def test_a_tick_is_as_long_as_it_can_be_for_every_step() -> None:
    loose = team_times(FIRST, end_ns=START_NS + 3000)
    tight = team_times(FIRST, end_ns=START_NS + 2000)
    assert ns_per_tick([loose]) == pytest.approx(3.0)
    assert ns_per_tick([loose, tight, loose]) == pytest.approx(2.0)
    assert ns_per_tick([]) > 0


def test_steps_that_follow_each_other_bound_the_tick_better_than_one() -> None:
    """Each has 1,000 ticks and as many around them; a tick is a nanosecond."""
    steps = [
        team_times([t + 2000 * i for t in FIRST], start_ns=START_NS + 2000 * i - 1000,
                   end_ns=START_NS + 2000 * i + 1000)
        for i in range(50)
    ]  # fmt: skip
    assert 1.0 <= ns_per_tick(steps) < 1.02
    assert ns_per_tick(steps[:1]) == pytest.approx(2.0)


def test_all_spans_of_a_step_come_in_order_the_outer_one_first() -> None:
    start = START_NS + MS
    team = team_times(FIRST, SECOND, start_ns=start, end_ns=start + 8 * MS)
    step = TracedStep(traced_step(0).spans, (team,))
    spans = step.all_spans(ns_per_tick([team]))
    assert [span.start_ns for span in spans] == sorted(span.start_ns for span in spans)
    assert [span.name for span in spans[:2]] == ["step", "schedule"]
    assert len(spans) == 4 + 5 + 4
    assert_nested(spans)
