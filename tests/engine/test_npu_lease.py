"""The lease between real processes: one at a time, in order, and given back by the dead."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from engine.errors import DeviceUnavailable
from engine.npu.lease import NoLease, NpuLease
from tests.lease_process import count_up, use_lease

SPAWN = multiprocessing.get_context("spawn")
LIMIT_S = 30.0


@dataclass
class User:
    process: SpawnProcess
    connection: Connection

    def ask(self) -> None:
        self.connection.send("ask")
        assert self.hear() == "asks"

    def hear(self) -> str:
        assert self.connection.poll(LIMIT_S), "nothing was heard"
        word: str = self.connection.recv()
        return word

    def give_back(self) -> None:
        self.connection.send("give back")
        assert self.hear() == "gave back"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], User]]:
    users: list[User] = []

    def one() -> User:
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=use_lease, args=(theirs, tmp_path / "npu.lease"))
        process.start()
        theirs.close()
        users.append(User(process, ours))
        return users[-1]

    yield one
    for user in users:
        user.kill()
        user.connection.close()


def wait_until_queued(path: Path, ticket: int) -> None:
    """Until that many tickets have been drawn: a number in the file, written before the wait."""
    for _ in range(int(LIMIT_S * 1000)):
        if int.from_bytes(path.read_bytes()[:8], "little") >= ticket:
            return
        threading.Event().wait(0.001)
    raise AssertionError(f"no ticket {ticket}")


def test_it_passes_on_in_the_order_of_asking(start: Callable[[], User], tmp_path: Path) -> None:
    users = [start() for _ in range(3)]
    for number, user in enumerate(users):
        user.ask()
        wait_until_queued(tmp_path / "npu.lease", number + 1)
    for number, user in enumerate(users):
        assert user.hear() == "has"
        assert not any(other.connection.poll() for other in users[number + 1 :])
        user.give_back()
        if number == 0:
            user.ask()  # again, behind the others
    assert users[0].hear() == "has"


def test_a_holder_that_is_killed_has_given_it_back(start: Callable[[], User]) -> None:
    holder, waiter = start(), start()
    holder.ask()
    assert holder.hear() == "has"
    waiter.ask()
    assert not waiter.connection.poll()
    holder.kill()
    assert waiter.hear() == "has"
    waiter.give_back()


def test_a_waiter_that_is_killed_is_passed_over_and_nobody_overtakes(
    start: Callable[[], User], tmp_path: Path
) -> None:
    holder, doomed, waiter = start(), start(), start()
    for number, user in enumerate((holder, doomed, waiter)):
        user.ask()
        wait_until_queued(tmp_path / "npu.lease", number + 1)
    assert holder.hear() == "has"
    doomed.kill()
    assert not waiter.connection.poll(), "the holder still has it"
    holder.give_back()
    assert waiter.hear() == "has"
    waiter.give_back()


def test_processes_never_have_it_at_the_same_time(tmp_path: Path) -> None:
    path, counter = tmp_path / "npu.lease", tmp_path / "counter"
    counter.write_text("0")
    processes = [SPAWN.Process(target=count_up, args=(path, counter, 60)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        assert process.exitcode == 0
    assert counter.read_text() == "240"


def test_threads_of_one_process_exclude_each_other_too(tmp_path: Path) -> None:
    lease, inside = NpuLease(tmp_path / "npu.lease"), []

    def use() -> None:
        for _ in range(50):
            with lease:
                inside.append(1)
                assert len(inside) == 1
                inside.pop()

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lease.close()


def test_it_is_given_back_when_the_step_fails(tmp_path: Path) -> None:
    lease = NpuLease(tmp_path / "npu.lease")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), lease:
            raise ZeroDivisionError
    lease.close()


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 16, b"\x00" * 64])
def test_a_file_with_anything_in_it_does(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "npu.lease"
    path.write_bytes(content)
    lease = NpuLease(path)
    for _ in range(3):
        with lease:
            pass
    lease.close()


def test_a_place_where_no_file_can_be_is_refused_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceUnavailable, match="cannot be opened .* or use --device cpu"):
        NpuLease(tmp_path / "file" / "npu.lease")


def test_no_lease_is_always_free() -> None:
    with NoLease(), NoLease():
        pass
