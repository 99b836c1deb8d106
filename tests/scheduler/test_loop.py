import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue

import pytest

from scheduler.loop import StepLoop
from scheduler.messages import (
    Abort,
    EndTrace,
    FinishReason,
    Shutdown,
    StepOutput,
    StepResult,
    ToEngine,
    Trace,
    TraceResult,
)
from tests.fakes import Rig, expected_tokens, make_request, make_rig


@contextmanager
def running_loop(rig: Rig) -> Iterator[tuple[SimpleQueue[ToEngine], Connection]]:
    """The loop in a thread; the test's ends of its inbox and of its pipe."""
    inbox: SimpleQueue[ToEngine] = SimpleQueue()
    ours, theirs = Pipe()
    thread = threading.Thread(target=StepLoop(rig.worker, inbox, theirs.send).run)
    thread.start()
    try:
        yield inbox, ours
    finally:
        inbox.put(Shutdown())
        thread.join(5)
        ours.close()
        theirs.close()
    assert not thread.is_alive()


def receive(connection: Connection) -> StepResult:
    assert connection.poll(5), "the loop sent nothing"
    result = connection.recv()
    assert isinstance(result, StepResult)
    return result


def outputs_until_end(connection: Connection, request_id: str) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += [o for o in receive(connection).outputs if o.request_id == request_id]
    return outputs


def test_requests_are_answered_with_one_message_per_step() -> None:
    rig = make_rig()
    with running_loop(rig) as (inbox, connection):
        inbox.put(make_request("r", [1, 2, 3], 4))
        outputs = outputs_until_end(connection, "r")
    tokens = [token for output in outputs for token in output.new_token_ids]
    assert tokens == expected_tokens(make_request("r", [1, 2, 3], 4), 64)[0]
    assert len(outputs) == 4 == rig.runner.num_executed


def test_an_abort_is_answered_even_when_nothing_else_runs() -> None:
    rig = make_rig()
    rig.runner.stall_at = {1: 0.05}
    with running_loop(rig) as (inbox, connection):
        inbox.put(make_request("r", [1, 2, 3], 50))
        receive(connection)
        inbox.put(Abort("r"))
        inbox.put(Abort("unknown"))
        while (result := receive(connection)).stats.num_running:
            pass
    assert result.outputs[-1].finish_reason is FinishReason.ABORT
    assert result.stats.num_free_blocks == 32


def test_all_messages_that_have_arrived_are_taken_before_the_next_step() -> None:
    rig = make_rig()
    inbox: SimpleQueue[ToEngine] = SimpleQueue()
    results: list[StepResult] = []

    def send(result: StepResult | TraceResult) -> None:
        assert isinstance(result, StepResult)
        results.append(result)
        if len(results) == 3:
            inbox.put(Shutdown())

    for index in range(3):
        inbox.put(make_request(f"r{index}", [index], 3))
    StepLoop(rig.worker, inbox, send).run()
    assert rig.runner.batch_sizes == [3, 3, 3]
    assert [len(result.outputs) for result in results] == [3, 3, 3]


def test_a_trace_is_answered_when_it_is_complete_and_when_it_is_ended() -> None:
    rig = make_rig()
    with running_loop(rig) as (inbox, connection):
        inbox.put(Trace(3))
        inbox.put(make_request("r", [1, 2, 3], 5))
        messages = [connection.recv() for _ in range(6)]
        assert [type(m) for m in messages].count(TraceResult) == 1
        (traced,) = [m for m in messages if isinstance(m, TraceResult)]
        assert len(traced.steps) == 3
        inbox.put(Trace(3))
        inbox.put(EndTrace())
        assert connection.poll(5) and connection.recv() == TraceResult(())
        inbox.put(EndTrace())
        inbox.put(make_request("s", [1], 1))
        assert isinstance(receive(connection), StepResult)


def test_the_loop_ends_when_nobody_listens_any_more() -> None:
    rig = make_rig()
    inbox: SimpleQueue[ToEngine] = SimpleQueue()
    ours, theirs = Pipe()
    ours.close()
    inbox.put(make_request("r"))
    StepLoop(rig.worker, inbox, theirs.send).run()
    theirs.close()
    assert rig.runner.num_executed == 1


def test_a_broken_invariant_is_logged_as_an_error_when_idle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = make_rig()
    rig.scheduler.kv.pool.take()
    inbox: SimpleQueue[ToEngine] = SimpleQueue()
    inbox.put(Shutdown())
    with caplog.at_level(logging.ERROR):
        StepLoop(rig.worker, inbox, lambda result: None).run()
    assert caplog.messages == ["invariant broken: block 0: ref count 1, in 0 tables"]
