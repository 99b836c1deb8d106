"""One step in two halves and two threads: one half's attention beside the other's segments.

```
 device     A0 B0 A1 B1 A2 B2 …        A: first half, B: second half, the number is the layer
 attention     A0 B0 A1 B1 A2 …
```

Each half takes its turn on the device and its turn on the CPU, the first half always before the
second: so nothing ever runs twice at a time on one of them, and a sequence may even be cut in two,
since the second part's attention of a layer finds what the first part has written. The result has
the same bits as the step in one piece. Either half's error ends both and fails the step.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from engine.batch import Batch, Float32Array
from engine.lane import Lane
from engine.model_runner import LaneSteps, StepLanes, run_rows

_FIRST, _SECOND = 0, 1


class OverlappedStep:
    """Made once and kept; its thread starts with the first step. Call it from one thread."""

    def __init__(self, steps: LaneSteps) -> None:
        self._steps = steps
        self._twins: dict[int, tuple[Lane, Lane]] = {}  # id of a lane → (lane, its twin)
        self._helper: ThreadPoolExecutor | None = None

    def execute(self, lanes: StepLanes, first: Batch, second: Batch) -> Float32Array:
        """Logits of both halves, one after the other. Raises DeviceError, and whatever either did.

        The halves' rows go through segment L and the head together: its weights are read once.
        """
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, "second-half")
        recorder = self._steps.recorder
        others, lanes = recorder.lanes(self._twins_of(lanes)), recorder.lanes(lanes)
        turns = _Turns()
        helping = self._helper.submit(self._run, others, second, turns, _SECOND)
        try:
            self._run(lanes, first, turns, _FIRST)
        finally:
            error = helping.exception()  # it ends soon, for it has the turns that it waits for
        if error is not None:
            raise error
        parts = [(lanes.segments[-1], first.logits_rows), (others.segments[-1], second.logits_rows)]
        return run_rows(lanes, parts)

    def forget(self) -> None:
        """Drops the twins; to be called when a lane is closed."""
        self._twins.clear()

    def close(self) -> None:
        self.forget()
        if self._helper is not None:
            self._helper.shutdown()

    def _run(self, lanes: StepLanes, batch: Batch, turns: _Turns, half: int) -> None:
        pieces = self._steps.pieces(lanes, batch)
        try:
            for _ in lanes.segments:
                for resource in (turns.device, turns.attention):
                    if not turns.take(resource, half):
                        return  # the other half has failed, and tells why
                    next(pieces)
                    turns.pass_on(resource, half)
        except BaseException:
            turns.give_up()
            raise

    def _twins_of(self, lanes: StepLanes) -> StepLanes:
        return StepLanes(tuple(map(self._twin, lanes.segments)), lanes.last, lanes.head)

    def _twin(self, lane: Lane) -> Lane:
        if id(lane) not in self._twins:
            self._twins[id(lane)] = (lane, lane.twin())
        return self._twins[id(lane)][1]


_Resource = tuple[threading.Lock, threading.Lock]


class _Turns:
    """Strict alternation on two resources. A lock that is free means: your turn."""

    def __init__(self) -> None:
        self.device, self.attention = self._new(), self._new()
        self._given_up = False

    def take(self, resource: _Resource, half: int) -> bool:
        """Waits for the turn. False if there is no point any more."""
        resource[half].acquire()
        return not self._given_up

    def pass_on(self, resource: _Resource, half: int) -> None:
        with suppress(RuntimeError):  # it is free already when the other half has given up
            resource[1 - half].release()

    def give_up(self) -> None:
        """Lets the other half run into the end, wherever it waits."""
        self._given_up = True
        for lock in (*self.device, *self.attention):
            with suppress(RuntimeError):
                lock.release()

    @staticmethod
    def _new() -> _Resource:
        locks = (threading.Lock(), threading.Lock())
        locks[_SECOND].acquire()
        return locks
