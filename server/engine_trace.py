"""The one trace that an engine may be recording, as the server sees it: asked for, waited for.

Belongs to the event loop's thread. Knows no engine process: it is told what comes from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from scheduler.messages import EndTrace, ToEngine, Trace, TraceResult
from server.errors import EngineUnavailable, TraceBusy

Answer = TraceResult | str
"""What was recorded, or why nothing comes any more."""


class EngineTrace:
    def __init__(self, name: str, send: Callable[[ToEngine], None]) -> None:
        self._name = name
        self._send = send
        self._answer: asyncio.Future[Answer] | None = None

    async def record(self, num_steps: int, timeout_s: float) -> TraceResult:
        """The next `num_steps` steps, or as many as there were after `timeout_s`.

        The step that runs then is part of it, so the answer may come that much later. Raises
        TraceBusy, or EngineUnavailable when the engine ends meanwhile.
        """
        if self._answer is not None:
            raise TraceBusy(
                f"A trace of {self._name} is being recorded already; try again when it has ended."
            )
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._send(Trace(num_steps))
        try:
            await asyncio.wait({answer}, timeout=timeout_s)
        finally:
            self.end()
        result = await asyncio.shield(answer)
        if isinstance(result, str):
            raise EngineUnavailable(result)
        return result

    def end(self) -> None:
        """Asks for what there is. Until it has come, no other trace can be recorded."""
        if self._answer is not None:
            self._send(EndTrace())

    def deliver(self, answer: Answer) -> None:
        """What the engine answered, or that it is gone; ignored if nothing was asked."""
        pending, self._answer = self._answer, None
        if pending is not None:
            pending.set_result(answer)
