"""One report of the devices, and everybody who listens hears of every change."""

from __future__ import annotations

from engine.device_board import DeviceBoard, DeviceReport, LaneReport

REPORT = DeviceReport("npu", "found", (LaneReport("npu", "closed"), LaneReport("cpu", "open")))


def test_a_listener_hears_how_it_is_and_what_changes() -> None:
    board, heard = DeviceBoard(REPORT), list[DeviceReport]()
    board.subscribe(heard.append)
    board.set_lane("npu", "opening", "compiling 1 of 4")
    board.set_lane("npu", "open", "fine", plan="npu from 8")
    board.set_lane("npu", "closed", "lost")
    assert [report.lanes[0].state for report in heard] == ["closed", "opening", "open", "closed"]
    assert [report.plan for report in heard] == ["", "", "npu from 8", "npu from 8"]
    assert all(report.lanes[1] == LaneReport("cpu", "open") for report in heard)
    assert board.report is heard[-1]
