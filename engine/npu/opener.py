"""Opens the NPU in a thread of its own, while the CPU serves: compile, load, try, measure.

Knows neither how that is done nor what it is good for: it runs the callable that it is given and
keeps the result until the loop's thread takes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from engine.cost_profile import CostProfile
from engine.errors import DeviceError, EngineError
from engine.step_form import NpuForms

logger = logging.getLogger(__name__)

OnPhase = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class OpenedNpu:
    """Ready to compute. `profile` None: nobody knows the costs, and there is nothing to choose.

    `note` says how it came to be, for people.
    """

    forms: NpuForms
    profile: CostProfile | None
    note: str


OpenNpu = Callable[[OnPhase], OpenedNpu]


class NpuOpener:
    """`open_npu` blocks, maybe for minutes, and may be called again after a fault."""

    def __init__(self, open_npu: OpenNpu, on_phase: OnPhase) -> None:
        self._open_npu = open_npu
        self._on_phase = on_phase
        self._done = threading.Event()
        self._result: OpenedNpu | EngineError | None = None

    def begin(self) -> None:
        """The result of an earlier one must have been taken."""
        self._done.clear()
        threading.Thread(target=self._run, name="npu-opener", daemon=True).start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether there is a result now."""
        return self._done.wait(timeout_s)

    def take(self) -> OpenedNpu | EngineError | None:
        """The result, once; None while there is none."""
        if not self._done.is_set():
            return None
        result, self._result = self._result, None
        return result

    def _run(self) -> None:
        try:
            self._result = self._open_npu(self._on_phase)
        except EngineError as error:
            self._result = error
        except Exception as error:  # in a thread nobody else would hear of it
            logger.exception("opening the NPU failed in a way that nobody foresaw")
            self._result = DeviceError(f"opening it failed: {type(error).__name__}: {error}")
        finally:
            self._done.set()
