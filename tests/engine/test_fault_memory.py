"""What one process leaves for the next when a call into the NPU hangs."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from engine.npu.fault_memory import (
    FIRST_BACK_OFF_S,
    FORGET_S,
    HANG_EXIT_CODE,
    MAX_BACK_OFF_S,
    FaultMemory,
)
from engine.npu.watchdog import Watchdog
from tests.hanging_process import hang

SPAWN = multiprocessing.get_context("spawn")


def test_hangs_are_counted_until_they_are_forgotten(tmp_path: Path) -> None:
    memory = FaultMemory(tmp_path / "deep" / "hang.json", clock=lambda: 100.0)
    assert memory.last_hang() is None
    memory.record_hang("one")
    memory.record_hang("two")
    hang = memory.last_hang()
    assert hang is not None and (hang.count, hang.reason, hang.time_s) == (2, "two", 100.0)
    assert hang.back_off_s == 2 * FIRST_BACK_OFF_S
    assert replace(hang, count=99).back_off_s == MAX_BACK_OFF_S
    memory.forget()
    memory.forget()
    assert memory.last_hang() is None
    assert [path.name for path in (tmp_path / "deep").iterdir()] == []


def test_an_old_hang_does_not_count(tmp_path: Path) -> None:
    now = [0.0]
    memory = FaultMemory(tmp_path / "hang.json", clock=lambda: now[0])
    memory.record_hang("long ago")
    now[0] = FORGET_S + 1
    assert memory.last_hang() is None
    memory.record_hang("now")
    hang = memory.last_hang()
    assert hang is not None and hang.count == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"time_s": "x"}', '{"time_s": 1}'])
def test_a_damaged_file_is_no_hang(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "hang.json").write_text(content)
    with caplog.at_level(logging.WARNING):
        assert FaultMemory(tmp_path / "hang.json").last_hang() is None
    assert "is ignored" in caplog.text


def test_a_call_that_comes_back_in_time_is_nobodys_business() -> None:
    hangs: list[str] = []
    watchdog = Watchdog(0.2, hangs.append)
    for _ in range(5):
        watchdog.enter("a call")
        watchdog.leave()
    watchdog.close()
    assert hangs == []


def test_a_call_that_does_not_come_back_is_reported_once_with_its_name() -> None:
    told = threading.Event()
    hangs: list[str] = []

    def on_hang(reason: str) -> None:
        hangs.append(reason)
        told.set()

    watchdog = Watchdog(0.05, on_hang)
    watchdog.enter("middle segment 3 on npu")
    assert told.wait(30)
    watchdog.close()
    assert hangs == ["middle segment 3 on npu did not come back within 0.05 s"]


def test_a_process_that_hangs_ends_itself_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "hang.json"
    process = SPAWN.Process(target=hang, args=(path,))
    process.start()
    process.join(60)
    assert process.exitcode == HANG_EXIT_CODE
    left = FaultMemory(path).last_hang()
    assert left is not None and left.reason.startswith("head segment 3 on npu did not come back")
