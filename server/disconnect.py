"""Work that ends when its client goes away. For answers that are sent whole: a stream notices by
itself. Knows ASGI's messages and nothing of what is worked on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """Nobody is there to be answered."""


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; cancels it and raises ClientDisconnected if the client leaves first.

    The request's body must have been read.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
