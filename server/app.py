"""The HTTP application, put together: routes, error handlers, middleware.

Gets everything it needs handed in and starts nothing: engines are loaded and drained by whoever
passes `lifespan`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from server.app_state import AppState
from server.background import BackgroundRuns
from server.disconnect import ClientDisconnected
from server.errors import ApiError, InvalidRequest
from server.http_settings import HttpSettings
from server.metrics import Metrics
from server.middleware import (
    EXPOSED_HEADERS,
    ApiKeyMiddleware,
    ErrorMiddleware,
    HeadMiddleware,
    HostMiddleware,
    RequestIdMiddleware,
    error_response,
)
from server.response_store import ResponseStore
from server.routes import (
    chat,
    completions,
    debug,
    embeddings,
    models,
    ops,
    rerank,
    responses,
    tokenize,
)
from server.served_model import ModelRegistry

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

_CLIENT_CLOSED_REQUEST = 499
"""Not sent to anybody: for logs and middleware, as nginx calls it."""


def create_app(
    models_: ModelRegistry,
    settings: HttpSettings | None = None,
    *,
    metrics: Metrics | None = None,
    lifespan: Lifespan | None = None,
) -> FastAPI:
    """The application. `metrics` is shared with whoever observes the engines' steps."""
    settings = settings or HttpSettings()
    app = FastAPI(title="hexlm", lifespan=lifespan, middleware=_middleware(settings))
    app.state.hexlm = AppState(
        models_,
        settings,
        metrics or Metrics(),
        ResponseStore(settings.max_stored_responses, settings.max_stored_response_bytes),
        BackgroundRuns(settings.max_background_responses),
    )
    every = (chat, completions, responses, embeddings, rerank, models, tokenize, ops, debug)
    for routes in every:
        app.include_router(routes.router)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientDisconnected, _on_disconnect)
    return app


def _middleware(settings: HttpSettings) -> list[Middleware]:
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=EXPOSED_HEADERS,
    )
    return [
        Middleware(RequestIdMiddleware),
        *([cors] if settings.cors_origins else []),
        Middleware(ErrorMiddleware),
        Middleware(HostMiddleware, hosts=settings.trusted_hosts, origins=settings.cors_origins),
        Middleware(ApiKeyMiddleware, keys=settings.all_keys),
        Middleware(HeadMiddleware),
    ]


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The framework's own 404 and 405, in OpenAI's words."""
    assert isinstance(error, HTTPException)
    answer = InvalidRequest(f"Invalid URL ({request.method} {request.url.path[:200]})")
    if error.status_code not in (404, 405):
        answer = InvalidRequest(str(error.detail)[:500])
    response = error_response(answer)
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


async def _on_validation_error(request: Request, error: Exception) -> Response:
    return error_response(InvalidRequest("A parameter of the URL is not valid."))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
