"""When a device may be tried again."""

from __future__ import annotations

import pytest

from engine.npu.lane_gate import (
    FIRST_BACK_OFF_S,
    MAX_BACK_OFF_S,
    STEADY_S,
    GateState,
    LaneGate,
    back_off,
)


def opened(at_s: float = 0.0) -> LaneGate:
    gate = LaneGate()
    gate.begin_opening()
    gate.opened(at_s, "fine")
    return gate


def test_it_begins_closed_and_due() -> None:
    gate = LaneGate()
    assert (gate.state, gate.is_due(0.0)) == (GateState.CLOSED, True)
    gate.begin_opening()
    assert (gate.state, gate.is_due(0.0)) == (GateState.OPENING, False)
    gate.opened(1.0, "fine")
    assert (gate.state, gate.reason) == (GateState.OPEN, "fine")


def test_it_is_due_again_after_the_back_off_and_not_before() -> None:
    gate = opened()
    assert gate.failed(10.0, "lost") == FIRST_BACK_OFF_S
    assert gate.reason == "lost"
    assert not gate.is_due(10.0 + FIRST_BACK_OFF_S - 0.001)
    assert gate.is_due(10.0 + FIRST_BACK_OFF_S)


def test_each_fault_in_a_row_doubles_the_time_up_to_the_cap() -> None:
    gate = LaneGate()
    found = []
    for i in range(12):
        gate.begin_opening()
        found.append(gate.failed(float(i), "lost"))
    assert found[:4] == [2.0, 4.0, 8.0, 16.0]
    assert found[-3:] == [MAX_BACK_OFF_S] * 3
    assert gate.num_faults == 12


def test_a_device_that_has_worked_for_long_starts_again_with_the_shortest_time() -> None:
    gate = opened()
    gate.failed(1.0, "lost")
    gate.begin_opening()
    gate.opened(10.0, "fine")
    assert gate.failed(10.0 + STEADY_S - 1, "lost") == 4.0
    gate.begin_opening()
    gate.opened(100.0, "fine")
    assert not gate.is_steady(100.0 + STEADY_S - 1) and gate.is_steady(100.0 + STEADY_S)
    assert gate.failed(100.0 + STEADY_S, "lost") == FIRST_BACK_OFF_S


@pytest.mark.parametrize(("count", "seconds"), [(1, 2.0), (2, 4.0), (1_000, MAX_BACK_OFF_S)])
def test_the_back_off_never_overflows(count: int, seconds: float) -> None:
    assert back_off(count) == seconds
