"""A step gives way to what is more urgent, and nobody sees a difference in what he gets."""

from __future__ import annotations

import pytest

from scheduler.messages import Abort, GenerationRequest, Priority
from tests.fakes import Rig, expected_tokens, make_request, make_rig

HIGH, NORMAL, LOW = Priority


Inbox = list[GenerationRequest]


def run(rig: Rig, inbox: Inbox, num_steps: int) -> None:
    for _ in range(num_steps):
        while inbox:
            rig.worker.add(inbox.pop())
        rig.step()


def rig_with(at: int, priority: Priority, of: Priority = LOW) -> tuple[Rig, Inbox]:
    """Two sequences of class `of`; during call `at` to the runner one of `priority` arrives."""
    rig, inbox = make_rig(), Inbox()

    def arrive() -> None:
        """As the receiver's thread does."""
        inbox.append(make_request("new", [9, 8], 3, priority))
        rig.worker.arrived(inbox[-1])

    for index in range(2):
        rig.worker.add(make_request(f"low{index}", [index, 1, 2], 12, of))
    rig.runner.arrive_at[at] = arrive
    return rig, inbox


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize(("priority", "of"), [(HIGH, LOW), (HIGH, NORMAL), (NORMAL, LOW)])
def test_a_better_class_does_not_wait_for_the_step(
    at: int, priority: Priority, of: Priority
) -> None:
    rig, inbox = rig_with(at, priority, of)
    run(rig, inbox, at + 1)
    assert rig.scheduler.totals.interrupted_steps == 1
    assert rig.scheduler.totals.failed_steps == 0
    run(rig, inbox, 1)
    assert rig.runner.batch_sizes[at + 1] == 2  # its prompt, alone
    assert len(rig.tokens("new")) == 1
    rig.run()
    for request_id, prompt, count in (("low0", [0, 1, 2], 12), ("low1", [1, 1, 2], 12)):
        assert rig.tokens(request_id) == expected_tokens(make_request("x", prompt, count), 64)[0]
    assert rig.tokens("new") == expected_tokens(make_request("x", [9, 8], 3), 64)[0]
    assert not rig.runner.violations


@pytest.mark.parametrize(("priority", "of"), [(LOW, LOW), (NORMAL, HIGH), (HIGH, HIGH)])
def test_an_equal_or_worse_class_waits(priority: Priority, of: Priority) -> None:
    rig, inbox = rig_with(3, priority, of)
    run(rig, inbox, 4)
    assert rig.scheduler.totals.interrupted_steps == 0
    rig.run()
    assert len(rig.tokens("low0")) == 12


def test_between_two_steps_and_for_other_messages_nothing_is_interrupted() -> None:
    rig, inbox = rig_with(99, HIGH)
    run(rig, inbox, 2)
    rig.worker.arrived(make_request("new", [9], 3, HIGH))
    rig.runner.arrive_at[2] = lambda: rig.worker.arrived(Abort("low0"))
    run(rig, inbox, 2)
    assert not rig.runner.is_interrupted
    assert rig.scheduler.totals.interrupted_steps == 0


def test_a_retry_one_by_one_gives_way_too() -> None:
    rig, inbox = rig_with(3, HIGH)
    rig.runner.raise_at = {1: RuntimeError("bad"), 2: RuntimeError("bad")}
    run(rig, inbox, 2)
    assert rig.scheduler.totals.interrupted_steps == 1
    rig.run()
    assert rig.tokens("low1") == expected_tokens(make_request("x", [1, 1, 2], 12), 64)[0]


def test_whom_an_interrupted_step_admitted_has_waited_as_long_as_it_did() -> None:
    rig, _ = rig_with(0, HIGH)
    result = rig.worker.step()
    assert len(result.stats.queue_times_s) == 2
    assert (result.outputs, result.stats.total_interrupted_steps) == ((), 1)
