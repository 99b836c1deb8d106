"""GET /v1/models and /v1/models/{id}: what is served. Says nothing of readiness (`ops.py`)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from server.app_state import app_state
from server.served_model import ServedModel

router = APIRouter()


@router.get("/v1/models", response_model=None)
async def list_models(request: Request) -> dict[str, Any]:
    models = app_state(request).models.list()
    return {"object": "list", "data": [model_object(model) for model in models]}


@router.get("/v1/models/{name:path}", response_model=None)
async def retrieve_model(request: Request, name: str) -> dict[str, Any]:
    """By name or alias; names may hold slashes."""
    return model_object(app_state(request).models.get(name))


def model_object(model: ServedModel) -> dict[str, Any]:
    """OpenAI's four fields, and the context length that is enforced, in tokens."""
    info = model.engine.info
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "hexlm",
        "max_model_len": model.context_limit,
        "aliases": list(model.aliases),
        "quantization": model.quantization,
        "device": info.device if info else None,
        "kv_format": info.kv_format if info else None,
    }
