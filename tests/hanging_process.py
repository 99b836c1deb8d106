"""A process whose main thread never comes back from a call."""

from __future__ import annotations

import threading
from pathlib import Path

from engine.npu.fault_memory import FaultMemory
from engine.npu.watchdog import Watchdog


def hang(path: Path) -> None:
    watchdog = Watchdog(0.2, FaultMemory(path).end_process)
    watchdog.enter("head segment 3 on npu")
    threading.Event().wait()
