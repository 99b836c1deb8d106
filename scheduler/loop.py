"""The loop of the engine process: messages in, steps, one message out per step.

The loop thread owns the worker and everything below it. Others only put messages into the inbox,
which is a thread-safe queue; a `Shutdown` in it ends the loop. Knows no pipe and no process: the
server may run the same loop in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import Empty, SimpleQueue

from scheduler.messages import (
    Abort,
    EndTrace,
    GenerationRequest,
    Shutdown,
    StepResult,
    ToEngine,
    Trace,
    TraceResult,
)
from scheduler.worker import ModelWorker

logger = logging.getLogger(__name__)


class StepLoop:
    """`send` takes one result per step, and that of a trace.

    If it raises OSError, the other side is gone.
    """

    def __init__(
        self,
        worker: ModelWorker,
        inbox: SimpleQueue[ToEngine],
        send: Callable[[StepResult | TraceResult], None],
    ) -> None:
        self._worker = worker
        self._inbox = inbox
        self._send = send

    def run(self) -> None:
        """Runs until a `Shutdown` arrives or the receiver of results is gone."""
        while self._take_messages():
            if not self._worker.has_work:
                continue
            result = self._worker.step()
            try:
                self._send(result)
            except OSError as exc:
                logger.info("the server is gone, the engine ends: %s", exc)
                return

    def _take_messages(self) -> bool:
        """All that has arrived; waits only if there is nothing else to do. False: end."""
        if not self._worker.has_work:
            self._check_invariants()
            if not self._take(self._inbox.get()):
                return False
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return True
            if not self._take(message):
                return False

    def _take(self, message: ToEngine) -> bool:
        match message:
            case GenerationRequest():
                self._worker.add(message)
            case Abort():
                self._worker.abort(message.request_id)
            case Trace():
                self._worker.trace(message.num_steps, self._send)
            case EndTrace():
                self._worker.end_trace()
            case Shutdown():
                return False
        return True

    def _check_invariants(self) -> None:
        for violation in self._worker.check_invariants():
            logger.error("invariant broken: %s", violation)
