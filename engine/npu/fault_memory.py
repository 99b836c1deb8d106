"""What a process leaves behind for the next one when the NPU hangs: a small file and an exit code.

Without it the next engine would walk into the same call and hang again, until the supervisor gives
the model up. With it the next one begins with the NPU closed, for longer after every hang. Hangs
older than `FORGET_S` do not count.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

HANG_EXIT_CODE = 83
"""Of a process that ended itself because a call into the NPU did not come back."""

FORGET_S = 6 * 3600.0
FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 60.0, 3600.0
"""How long the NPU stays closed after a hang: it has cost the start of an engine, too."""


@dataclass(frozen=True, slots=True)
class Hang:
    """`time_s` is Unix time of the newest hang, `count` how many there were in a row."""

    time_s: float
    count: int
    reason: str

    @property
    def back_off_s(self) -> float:
        return min(MAX_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0 ** min(self.count - 1, 30))


class FaultMemory:
    """One file per NPU. What cannot be read counts as no hang; what cannot be written is logged."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock

    def last_hang(self) -> Hang | None:
        try:
            value = json.loads(self._path.read_text("utf-8"))
            hang = Hang(float(value["time_s"]), int(value["count"]), str(value["reason"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be read and is ignored: %s", self._path, error)
            return None
        return hang if 0 <= self._clock() - hang.time_s < FORGET_S else None

    def record_hang(self, reason: str) -> None:
        last = self.last_hang()
        count = 1 + (last.count if last else 0)
        value = {"time_s": self._clock(), "count": count, "reason": reason}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            temporary.write_text(json.dumps(value), "utf-8")
            temporary.replace(self._path)
        except OSError as error:
            logger.error("%s cannot be written: %s", self._path, error)

    def forget(self) -> None:
        """The NPU has worked again for long enough."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def end_process(self, reason: str) -> None:
        """Never returns. Called in the watchdog's thread: the one that hangs cannot be reached."""
        self.record_hang(reason)
        logger.critical("ending this process so that another one can go on: %s", reason)
        logging.shutdown()
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(HANG_EXIT_CODE)
