"""GET /, /health, /live, /ready and /metrics: for supervisors and for people.

`/`: what this is and where its parts are. `/live`: the process answers. `/ready`: some model can
answer now, else 503 with the reasons. `/health`: everything about every engine; 200 only if all
are ready.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.version import own_version
from server.adapters.reply import json_bytes
from server.app_state import app_state
from server.engine_state import EngineState
from server.metrics import CONTENT_TYPE
from server.model_registry import Served
from server.served_model import ModelRegistry

router = APIRouter()

_RETRY_AFTER_S = 5


@router.get("/", response_model=None)
async def root() -> dict[str, str]:
    return {
        "name": "hexlm",
        "version": own_version(),
        "api": "/v1",
        "models": "/v1/models",
        "health": "/health",
        "metrics": "/metrics",
        "docs": "/docs",
        "openapi": "/openapi.json",
    }


@router.get("/live", response_model=None)
async def live() -> dict[str, str]:
    return {"status": "alive"}


@router.get("/ready", response_model=None)
async def ready(request: Request) -> Response:
    models = _all_models(app_state(request).models)
    if any(model.engine.state is EngineState.READY for model in models):
        return _answer({"status": "ready"}, is_ready=True)
    reasons = {model.name: _reason(model) for model in models}
    return _answer({"status": "not ready", "reasons": reasons}, is_ready=False)


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    models = _all_models(app_state(request).models)
    is_ready = bool(models) and all(m.engine.state is EngineState.READY for m in models)
    body = {
        "status": "ready" if is_ready else "not ready",
        "models": {model.name: _model_health(model) for model in models},
    }
    return _answer(body, is_ready=is_ready)


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    state = app_state(request)
    for model in _all_models(state.models):
        if model.engine.info is not None:
            state.metrics.observe_engine(model.name, model.engine.info)
        if model.engine.devices is not None:
            state.metrics.observe_devices(model.name, model.engine.devices)
    return Response(state.metrics.render(), headers={"content-type": CONTENT_TYPE})


def _answer(body: dict[str, Any], *, is_ready: bool) -> Response:
    headers = {} if is_ready else {"retry-after": str(_RETRY_AFTER_S)}
    return Response(
        json_bytes(body),
        status_code=200 if is_ready else 503,
        media_type="application/json",
        headers=headers,
    )


def _all_models(models: ModelRegistry) -> tuple[Served, ...]:
    return (*models.list(), *models.embedders())


def _reason(model: Served) -> str:
    detail = model.engine.state_detail
    return f"{model.engine.state}: {detail}" if detail else str(model.engine.state)


def _model_health(model: Served) -> dict[str, Any]:
    """State, what the engine runs on and why, and its counts after the newest step."""
    engine, stats = model.engine, model.engine.stats
    return {
        "state": str(engine.state),
        "detail": engine.state_detail,
        "engine": asdict(engine.info) if engine.info else None,
        "devices": asdict(engine.devices) if engine.devices else None,
        "lanes": [asdict(lane) for lane in stats.lanes],
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "num_blocks": stats.num_blocks,
        "num_free_blocks": stats.num_free_blocks,
        "total_steps": stats.total_steps,
        "total_preemptions": stats.total_preemptions,
        "total_failed_steps": stats.total_failed_steps,
        "total_interrupted_steps": stats.total_interrupted_steps,
    }
