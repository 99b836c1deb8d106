"""Who is told what happens inside a step, and when. Off, it is a `NoRecorder`, which hears nothing.

Whatever computes steps has one and calls it in any case: that costs a few calls of empty functions
per step, and no questions. `span_recorder.py` has the one that listens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.buckets import Piece
from engine.span import Category, Span

if TYPE_CHECKING:
    from engine.attention import Attend
    from engine.batch import Batch
    from engine.model_runner import StepLanes

Phases = tuple[tuple[str, int | None], ...]


class Recorder(Protocol):
    def add(self, span: Span) -> None:
        """One that is complete."""
        ...

    def now_ns(self) -> int:
        """A beginning, to be given back with the end; 0 when nobody listens."""
        ...

    def ended(self, name: str, category: Category, track: str, start_ns: int) -> None:
        """What began at `start_ns` ends now."""
        ...

    def called(self, graph: str, track: str, start_ns: int, piece: Piece, num_bytes: int) -> None:
        """A call into a device that began at `start_ns` has come back."""
        ...

    def ran(
        self, phases: Phases, ticks: NDArray[np.int64], num_threads: int, start_s: float
    ) -> None:
        """A compiled step that began at `start_s` (`perf_counter`) has ended.

        `ticks`: see `span.TeamTimes`; valid until the next step.
        """
        ...

    def lanes(self, lanes: StepLanes) -> StepLanes:
        """What to use instead of these lanes: they themselves when nobody listens."""
        ...

    def attend(self, attend: Attend, batch: Batch) -> Attend:
        """What to call instead of this step's attention."""
        ...


class NoRecorder:
    def add(self, span: Span) -> None:
        pass

    def now_ns(self) -> int:
        return 0

    def ended(self, name: str, category: Category, track: str, start_ns: int) -> None:
        pass

    def called(self, graph: str, track: str, start_ns: int, piece: Piece, num_bytes: int) -> None:
        pass

    def ran(
        self, phases: Phases, ticks: NDArray[np.int64], num_threads: int, start_s: float
    ) -> None:
        pass

    def lanes(self, lanes: StepLanes) -> StepLanes:
        return lanes

    def attend(self, attend: Attend, batch: Batch) -> Attend:
        return attend


NO_RECORDER = NoRecorder()

Record = Callable[[Recorder], None]
"""From now on tells this recorder what happens."""


def record_nothing(recorder: Recorder) -> None:
    """Of a runner that tells nothing."""
