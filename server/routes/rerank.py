"""POST /v1/rerank, and the same under the paths that Jina's, Cohere's and vLLM's clients call."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.adapters.reply import json_bytes
from server.adapters.rerank import rerank_body
from server.app_state import app_state
from server.embedding_inputs import encode_inputs, read_documents
from server.embedding_protocol import RerankBody, refuse_in_embeddings
from server.openapi import json_body
from server.routes.body import read_json
from server.routes.embed import device_header, embed

router = APIRouter()

_BODY = json_body(RerankBody)


@router.post("/v1/rerank", response_model=None, openapi_extra=_BODY)
@router.post("/v2/rerank", response_model=None, openapi_extra=_BODY)
@router.post("/rerank", response_model=None, openapi_extra=_BODY)
async def rerank(request: Request) -> Response:
    """The documents in the order of their nearness to the query, the nearest first."""
    state = app_state(request)
    value = await read_json(request)
    refuse_in_embeddings(value)
    body = state.reader.read(RerankBody, value)
    model = state.models.get_embedder(body.model)
    documents = read_documents(body.documents)
    names = ["query", *(f"documents[{i}]" for i in range(len(documents)))]
    token_ids = await asyncio.to_thread(
        encode_inputs, [body.query, *documents], model, body.truncate_prompt_tokens, names
    )
    vectors = await embed(request, model, token_ids)
    answer = rerank_body(vectors, documents, body, model, sum(map(len, token_ids)))
    return Response(json_bytes(answer), media_type="application/json", headers=device_header(model))
