"""GET /v1/models and /v1/models/{id}: what is served. Says nothing of readiness (`ops.py`)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from server.app_state import app_state
from server.model_registry import model_of_any_kind
from server.served_embedder import ServedEmbedder
from server.served_model import ModelRegistry, ServedModel

router = APIRouter()


@router.get("/v1/models", response_model=None)
@router.get("/v1/models/", response_model=None, include_in_schema=False)
async def list_models(request: Request) -> dict[str, Any]:
    models = app_state(request).models
    data = [*map(model_object, models.list()), *map(embedder_object, models.embedders())]
    return {"object": "list", "data": data}


@router.get("/v1/models/{name:path}", response_model=None)
async def retrieve_model(request: Request, name: str) -> dict[str, Any]:
    """By name or alias; names may hold slashes."""
    return object_of(app_state(request).models, name)


def object_of(models: ModelRegistry, name: str) -> dict[str, Any]:
    """Of a model of either kind. Raises UnknownModel."""
    model = model_of_any_kind(models, name)
    return embedder_object(model) if isinstance(model, ServedEmbedder) else model_object(model)


def model_object(model: ServedModel) -> dict[str, Any]:
    """A model that writes text."""
    info = model.engine.info
    return {
        **_common_fields(model, "generation"),
        "kv_format": info.kv_format if info else None,
        "dimensions": None,
    }


def embedder_object(model: ServedEmbedder) -> dict[str, Any]:
    """A model that gives embeddings, of `dimensions` numbers each, or scores for a query."""
    scores = model.is_cross_encoder
    return {
        **_common_fields(model, "rerank" if scores else "embedding"),
        "kv_format": None,
        "dimensions": None if scores else model.dimensions,
    }


def _common_fields(model: ServedModel | ServedEmbedder, kind: str) -> dict[str, Any]:
    """OpenAI's four fields, and the context length that is enforced, in tokens."""
    info = model.engine.info
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "hexlm",
        "kind": kind,
        "max_model_len": model.context_limit,
        "aliases": list(model.aliases),
        "quantization": model.quantization,
        "device": info.device if info else None,
    }
