"""The body of a request: read with a limit, parsed by hand. Knows no field."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from server.app_state import app_state
from server.disconnect import ClientDisconnected
from server.errors import BodyTooLarge
from server.json_body import parse_body

_LARGE_BODY_BYTES = 64 * 1024
"""From here on parsing leaves the event loop."""


async def read_json(request: Request) -> dict[str, Any]:
    """The JSON object in the body. Raises InvalidRequest or BodyTooLarge."""
    raw = await _read(request, app_state(request).settings.max_body_bytes)
    if len(raw) < _LARGE_BODY_BYTES:
        return parse_body(raw)
    return await asyncio.to_thread(parse_body, raw)


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect as error:
        raise ClientDisconnected from error
    return bytes(raw)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {max_bytes} bytes.")
