"""What surrounds every request, as pure ASGI: ids, last-resort errors, hosts and keys.

From the outside in: request id, CORS (starlette's), errors, host, key, HEAD. So every answer has an
id, errors carry CORS headers, and a preflight needs no key. Of routes it knows their paths only.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.adapters.reply import json_bytes
from server.api_keys import ApiKey, Keyring, Tenant
from server.errors import ApiError, HostNotAllowed

logger = logging.getLogger(__name__)

EXPOSED_HEADERS = (
    "x-request-id",
    "x-hexlm-device",
    "retry-after",
    *(
        f"x-ratelimit-{what}-{kind}"
        for kind in ("requests", "tokens")
        for what in ("limit", "remaining", "reset")
    ),
)
OPEN_PATHS = frozenset({"/", "/health", "/live", "/ready", "/metrics"})
"""What a supervisor asks without a key."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def error_response(error: ApiError) -> Response:
    """An error in OpenAI's shape with the headers that belong to it."""
    return Response(
        json_bytes(error.body()),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


class RequestIdMiddleware:
    """Gives every response `x-request-id`: the client's own if it sent a sensible one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        state = scope.setdefault("state", {})
        state["request_id"], state["arrival_s"] = request_id, time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        return await self._app(scope, receive, send_with_id)


class ErrorMiddleware:
    """Answers errors that no handler took. What is not an ApiError is ours: 500, text in the log.

    After the headers nothing can be answered: the error is logged and the connection ends.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        except Exception:  # the last handler: a client gets our error shape, the log the cause
            request_id = scope.get("state", {}).get("request_id")
            logger.exception("request %s to %s failed", request_id, scope["path"])
            if has_started:
                raise
            failure = ApiError(f"The server failed. Its log tells why, under {request_id}.")
            await error_response(failure)(scope, receive, send)


class HostMiddleware:
    """Refuses a web page that reaches a loopback server: by a rebound name or across sites."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._hosts:
            self._check(Headers(scope=scope), scope["method"])
        await self._app(scope, receive, send)

    def _check(self, headers: Headers, method: str) -> None:
        host = host_name(headers.get("host", ""))
        if host not in self._hosts:
            raise HostNotAllowed(
                f"The host name '{host[:100]}' is not one of this server's. Add it to the "
                "trusted hosts if it should be."
            )
        crosses_sites = headers.get("sec-fetch-site") == "cross-site"
        if crosses_sites and method not in _SAFE_METHODS and not self._allows_origin(headers):
            raise HostNotAllowed(
                "Web pages of other sites may not use this server unless their origin is allowed."
            )

    def _allows_origin(self, headers: Headers) -> bool:
        return "*" in self._origins or headers.get("origin") in self._origins


class ApiKeyMiddleware:
    """Asks for `Authorization: Bearer <key>` if there are keys; runs before the body is read.

    Leaves the key's tenant in the request's state and counts its POST requests: everything that
    makes work is a POST. A key with limits is told of them in the headers of every answer.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey]) -> None:
        self._app = app
        self._keyring = Keyring(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keyring or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        tenant = self._keyring.find(_bearer(scope))
        scope.setdefault("state", {})["tenant"] = tenant
        if scope["method"] == "POST":
            tenant.limiter.admit()

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(tenant.limiter.headers())
            await send(message)

        return await self._app(scope, receive, send_with_limits)


class HeadMiddleware:
    """Answers HEAD as GET without its body: every address that can be read has it, as HTTP asks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self._app(scope, receive, send)

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        return await self._app({**scope, "method": "GET"}, receive, send_head)


def host_name(host: str) -> str:
    """The name in a Host header, lower-case and without the port: `[::1]:80` → `[::1]`."""
    host = host.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def tenant_of(request: Request) -> Tenant | None:
    """Whose key the request came with; None when the server has no keys."""
    tenant = getattr(request.state, "tenant", None)
    assert tenant is None or isinstance(tenant, Tenant)
    return tenant


def _bearer(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = bytes(value).partition(b" ")
            return key.strip(b" ") if scheme.lower() == b"bearer" else None
    return None
