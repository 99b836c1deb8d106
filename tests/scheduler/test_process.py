import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from engine.device_board import DeviceBoard, DeviceReport, LaneReport
from engine.errors import DoesNotFit
from scheduler.messages import (
    EngineFailed,
    EngineLoading,
    EngineReady,
    FromEngine,
    Priority,
    Shutdown,
    StepResult,
)
from scheduler.policy import SchedulerConfig
from scheduler.process import EngineLoader, engine_process_main, run_engine
from tests.fakes import (
    FakeEngine,
    FakeFacts,
    ScriptedRunner,
    expected_tokens,
    make_config,
    make_request,
)


def load_fake(on_phase: Callable[[str], None]) -> FakeEngine:
    on_phase("reading weights")
    return FakeEngine(ScriptedRunner(block_size=4))


def load_with_buckets(on_phase: Callable[[str], None]) -> FakeEngine:
    return FakeEngine(ScriptedRunner(block_size=4), info=FakeFacts(token_buckets=(1, 8)))


def load_nothing(on_phase: Callable[[str], None]) -> FakeEngine:
    raise DoesNotFit("the weights need 9 GB,\n8 GB are free")


def load_badly(on_phase: Callable[[str], None]) -> FakeEngine:
    raise FileNotFoundError(2, "No such file", "model.json")


def start_thread(
    load: EngineLoader, config: SchedulerConfig
) -> tuple[threading.Thread, Connection]:
    ours, theirs = Pipe()

    def main() -> None:
        run_engine(theirs, load, config)
        theirs.close()

    thread = threading.Thread(target=main)
    thread.start()
    return thread, ours


def receive(connection: Connection) -> FromEngine:
    assert connection.poll(20), "the engine sent nothing"
    message: FromEngine = connection.recv()
    return message


def generate(connection: Connection) -> list[int]:
    connection.send(make_request("r", [1, 2, 3], 4))
    tokens: list[int] = []
    while len(tokens) < 4:
        result = receive(connection)
        assert isinstance(result, StepResult)
        tokens += [token for output in result.outputs for token in output.new_token_ids]
    return tokens


def test_an_engine_loads_says_what_it_is_generates_and_shuts_down() -> None:
    thread, connection = start_thread(load_fake, make_config(max_model_len=7, num_blocks=1))
    assert receive(connection) == EngineLoading("reading weights")
    ready = receive(connection)
    assert isinstance(ready, EngineReady)
    assert (ready.info.max_model_len, ready.info.num_blocks, ready.info.max_num_seqs) == (64, 32, 4)
    assert generate(connection) == expected_tokens(make_request("r", [1, 2, 3], 4), 64)[0]
    connection.send(Shutdown())
    thread.join(5)
    assert not thread.is_alive()
    connection.close()


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (load_nothing, "the weights need 9 GB, 8 GB are free"),
        (load_badly, "[Errno 2] No such file: 'model.json'"),
    ],
)
def test_a_failure_to_load_is_told_in_one_line(load: EngineLoader, reason: str) -> None:
    thread, connection = start_thread(load, make_config())
    assert receive(connection) == EngineFailed(reason)
    thread.join(5)
    assert not thread.is_alive()
    connection.close()


def test_numbers_that_contradict_each_other_are_a_failure_to_load() -> None:
    thread, connection = start_thread(load_fake, make_config(max_num_batched_tokens=4))
    receive(connection)
    failed = receive(connection)
    assert isinstance(failed, EngineFailed) and "max_num_batched_tokens (4)" in failed.reason
    thread.join(5)
    connection.close()


def test_an_engine_with_several_devices_reports_every_change_of_them() -> None:
    lanes = (LaneReport("npu", "opening"), LaneReport("cpu", "open"))
    board = DeviceBoard(DeviceReport("npu", "found", lanes))

    def load(on_phase: Callable[[str], None]) -> FakeEngine:
        return FakeEngine(ScriptedRunner(block_size=4), devices=board)

    thread, connection = start_thread(load, make_config())
    assert receive(connection) == board.report
    assert isinstance(receive(connection), EngineReady)
    board.set_lane("npu", "open", "fine", "npu from 8")
    told = receive(connection)
    assert isinstance(told, DeviceReport)
    assert (told.lanes[0], told.plan) == (LaneReport("npu", "open", "fine"), "npu from 8")
    assert generate(connection) == expected_tokens(make_request("r", [1, 2, 3], 4), 64)[0]
    connection.close()
    thread.join(5)
    assert not thread.is_alive()
    board.set_lane("npu", "closed", "nobody hears it")


def test_what_is_more_urgent_interrupts_the_step_that_runs() -> None:
    has_begun = threading.Event()
    runner = ScriptedRunner(block_size=4, arrive_at={1: has_begun.set}, stall_at={1: 0.5})
    thread, connection = start_thread(lambda on_phase: FakeEngine(runner), make_config())
    assert isinstance(receive(connection), EngineReady)
    connection.send(make_request("low", [1, 2, 3], 8, Priority.LOW))
    receive(connection)  # its prompt; the step after it takes long
    assert has_begun.wait(20)
    connection.send(make_request("high", [1, 2, 3], 1, Priority.HIGH))
    interrupted, following = receive(connection), receive(connection)
    assert isinstance(interrupted, StepResult) and isinstance(following, StepResult)
    assert (interrupted.outputs, interrupted.stats.total_interrupted_steps) == ((), 1)
    assert [output.request_id for output in following.outputs] == ["high"]
    connection.send(Shutdown())
    thread.join(5)
    connection.close()


def test_an_engine_ends_when_the_connection_closes() -> None:
    thread, connection = start_thread(load_fake, make_config())
    connection.close()
    thread.join(5)
    assert not thread.is_alive()


def test_a_spawned_engine_process_serves_and_ends_with_its_server() -> None:
    ours, theirs = Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=engine_process_main, args=(theirs, load_fake, make_config()))
    process.start()
    theirs.close()
    assert receive(ours) == EngineLoading("reading weights")
    assert isinstance(receive(ours), EngineReady)
    assert generate(ours) == expected_tokens(make_request("r", [1, 2, 3], 4), 64)[0]
    ours.close()
    process.join(15)
    assert process.exitcode == 0
    process.close()


def test_steps_are_cut_to_the_buckets_of_the_engine() -> None:
    thread, connection = start_thread(load_with_buckets, make_config())
    while not isinstance(receive(connection), EngineReady):
        pass
    connection.send(make_request("r", [1, 2, 3, 4, 5, 6, 7, 1, 2, 3], 1))
    first = receive(connection)
    assert isinstance(first, StepResult) and first.stats.num_step_tokens == 9
    connection.send(Shutdown())
    thread.join(20)
    assert not thread.is_alive()
