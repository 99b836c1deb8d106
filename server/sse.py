"""Event streams over sse-starlette, framed as clients need them.

Line ends are LF alone (some clients split on two of them), comments say `keep-alive` (some stop at
`ping`) and run on a clock, whatever the engine does. An error after the headers is one last event
`data: {"error": …}`, and then the stream ends without `[DONE]`.

Memory: the next piece is asked for when the socket took the last one, so nothing is queued here;
what comes meanwhile is merged in `step_merge.py`. Knows nothing of what the pieces say.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from server.adapters.reply import error_frame
from server.errors import ApiError, GenerationFailed

logger = logging.getLogger(__name__)

_SHUTDOWN_GRACE_S = 86_400.0
"""At shutdown the drain ends the sequences, and so the streams; the transport must not cut them."""


class EventStream(EventSourceResponse):
    """`close` is called once the response is over, however it ended, even if it never began."""

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        close: Callable[[], Awaitable[None]],
        *,
        keep_alive_interval_s: float,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(
            _with_error_event(pieces),
            headers=headers,
            ping=keep_alive_interval_s,
            sep="\n",
            ping_message_factory=_keep_alive,
            shutdown_grace_period=_SHUTDOWN_GRACE_S,
        )
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._close()


def _keep_alive() -> ServerSentEvent:
    return ServerSentEvent(comment="keep-alive", sep="\n")


async def _with_error_event(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for piece in pieces:
            yield piece
    except ApiError as error:
        yield error_frame(error)
    except Exception:  # the headers are sent: only an event can still tell the client
        logger.exception("a stream failed")
        yield error_frame(GenerationFailed("The server failed while it wrote the answer."))
