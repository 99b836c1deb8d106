"""What every route needs, in one object on the application. Knows no route."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.requests import Request

from server.http_settings import HttpSettings
from server.metrics import Metrics
from server.middleware import cache_scope
from server.request_context import RequestContext
from server.served_model import ModelRegistry
from server.validation import BodyReader


@dataclass(frozen=True)
class AppState:
    models: ModelRegistry
    settings: HttpSettings
    metrics: Metrics
    reader: BodyReader = field(default_factory=BodyReader)

    def context(self, request: Request) -> RequestContext:
        return RequestContext(
            cache_scope=cache_scope(request),
            timeout_s=self.settings.default_timeout_s,
            arrival_s=request.state.arrival_s,
        )


def app_state(request: Request) -> AppState:
    state = request.app.state.hexlm
    assert isinstance(state, AppState)
    return state
