"""The NPU is opened in a thread of its own; whatever happens there is a result."""

from __future__ import annotations

import logging
import threading

import pytest

from engine.errors import DeviceError, DeviceFull
from engine.npu.opener import NpuOpener, OnPhase, OpenedNpu


def test_there_is_no_result_before_it_is_done_and_it_is_taken_once() -> None:
    may_end = threading.Event()

    def open_npu(on_phase: OnPhase) -> OpenedNpu:
        on_phase("loading")
        may_end.wait()
        raise DeviceFull("needs 3 GB")

    phases: list[str] = []
    opener = NpuOpener(open_npu, phases.append)
    for _ in range(2):
        may_end.clear()
        opener.begin()
        assert opener.take() is None and not opener.wait(0)
        may_end.set()
        assert opener.wait(60)
        assert isinstance(opener.take(), DeviceFull)
        assert opener.take() is None
    assert phases == ["loading", "loading"]


def test_an_error_that_nobody_foresaw_is_a_result_too(caplog: pytest.LogCaptureFixture) -> None:
    def broken(on_phase: OnPhase) -> OpenedNpu:
        raise KeyError("surprise")

    opener = NpuOpener(broken, lambda phase: None)
    with caplog.at_level(logging.ERROR):
        opener.begin()
        assert opener.wait(60)
    result = opener.take()
    assert isinstance(result, DeviceError) and "KeyError: 'surprise'" in str(result)
    assert "nobody foresaw" in caplog.text
