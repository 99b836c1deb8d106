"""What every route needs, in one object on the application. Knows no route."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from starlette.requests import Request

from server.background import BackgroundRuns
from server.errors import InvalidRequest
from server.http_settings import HttpSettings
from server.limits import MAX_TIMEOUT_S
from server.metrics import Metrics
from server.middleware import tenant_of
from server.request_context import RequestContext
from server.response_store import ResponseStore
from server.served_model import ModelRegistry
from server.validation import BodyReader

TIMEOUT_HEADER = "x-request-timeout"


@dataclass(frozen=True)
class AppState:
    models: ModelRegistry
    settings: HttpSettings
    metrics: Metrics
    responses: ResponseStore
    background: BackgroundRuns
    reader: BodyReader = field(default_factory=BodyReader)

    def context(self, request: Request) -> RequestContext:
        """Raises InvalidRequest if the time limit in the headers is no number of seconds."""
        tenant = tenant_of(request)
        return RequestContext(
            cache_scope=tenant.cache_scope if tenant else "",
            timeout_s=_header_timeout_s(request) or self.settings.default_timeout_s,
            highest_priority=tenant.priority if tenant else None,
            arrival_s=request.state.arrival_s,
        )


def app_state(request: Request) -> AppState:
    state = request.app.state.hexlm
    assert isinstance(state, AppState)
    return state


def scope_of(request: Request) -> str:
    """Whose stored responses the request may see: those of its API key."""
    tenant = tenant_of(request)
    return tenant.cache_scope if tenant else ""


def charge_tokens(request: Request, num_tokens: int) -> None:
    """Count tokens against the limit of the request's API key, if it has one."""
    tenant = tenant_of(request)
    if tenant is not None:
        tenant.limiter.charge_tokens(num_tokens)


def _header_timeout_s(request: Request) -> float | None:
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"The header '{TIMEOUT_HEADER}' must be a number of seconds above 0 and up to "
            f"{MAX_TIMEOUT_S:,}.",
            param=TIMEOUT_HEADER,
        )
    return seconds
