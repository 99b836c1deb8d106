"""What the devices of an engine are doing, for people: one report, replaced whenever it changes.

Written by the loop's thread and by the one that opens the NPU; read by whoever subscribes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaneReport:
    """`state` is "open", "opening" or "closed"; `detail` says how far it is, or why."""

    name: str
    state: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """`device` is what shall do the matrix work, `reason` why; `plan` what runs where, in words."""

    device: str
    reason: str
    lanes: tuple[LaneReport, ...]
    plan: str = ""


OnReport = Callable[[DeviceReport], None]


class DeviceBoard:
    def __init__(self, report: DeviceReport) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._listeners: list[OnReport] = []

    @property
    def report(self) -> DeviceReport:
        return self._report

    def subscribe(self, listener: OnReport) -> None:
        """It is called with the report as it is now, and at every change, in any thread."""
        with self._lock:
            self._listeners.append(listener)
            listener(self._report)

    def set_lane(self, name: str, state: str, detail: str, plan: str | None = None) -> None:
        with self._lock:
            lanes = tuple(
                LaneReport(name, state, detail) if lane.name == name else lane
                for lane in self._report.lanes
            )
            changes: dict[str, Any] = {"lanes": lanes}
            if plan is not None:
                changes["plan"] = plan
            self._report = replace(self._report, **changes)
            for listener in self._listeners:
                listener(self._report)
