"""Watches for calls into a driver that do not come back.

A native call cannot be interrupted, and a thread that is left behind in one would keep the device,
its memory and the lease for ever. So a call that takes longer than its bound ends the process: the
supervisor starts another one, and every request goes on exactly where it was. `on_hang` does that
(`fault_memory.end_process`); a test does something milder.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Watchdog:
    """One thread, which sleeps. Entering and leaving a call costs well under a microsecond."""

    def __init__(self, bound_s: float, on_hang: Callable[[str], None]) -> None:
        self.bound_s = bound_s
        self._on_hang = on_hang
        self._call: tuple[str, float] | None = None  # what runs, and since when; set atomically
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="npu-watchdog", daemon=True)
        self._thread.start()

    def enter(self, what: str) -> None:
        """A call begins. There is at most one at a time, as the device allows."""
        self._call = (what, time.monotonic())

    def leave(self) -> None:
        self._call = None

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.bound_s / 8):
            call = self._call
            if call is not None and (seconds := time.monotonic() - call[1]) > self.bound_s:
                self._call = None
                logger.critical("%s has not come back for %.1f s", call[0], seconds)
                self._on_hang(f"{call[0]} did not come back within {self.bound_s:g} s")
