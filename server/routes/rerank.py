"""POST /v1/rerank, and the same under the paths that Jina's, Cohere's and vLLM's clients call."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.adapters.reply import json_bytes
from server.adapters.rerank import cosine_scores, logistic_scores, rerank_body
from server.app_state import app_state
from server.embedding_inputs import TokenIds, encode_inputs, encode_pairs, read_documents
from server.embedding_protocol import RerankBody, refuse_in_embeddings
from server.openapi import json_body
from server.routes.body import read_json
from server.routes.embed import device_header, embed
from server.served_embedder import ServedEmbedder

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
    model = state.models.get_reranker(body.model)
    documents = read_documents(body.documents)
    token_ids = await asyncio.to_thread(_encode, body, documents, model)
    outputs = await embed(request, model, token_ids)
    scores = logistic_scores(outputs) if model.is_cross_encoder else cosine_scores(outputs)
    answer = rerank_body(scores, documents, body, model, sum(map(len, token_ids)))
    return Response(json_bytes(answer), media_type="application/json", headers=device_header(model))


def _encode(body: RerankBody, documents: list[str], model: ServedEmbedder) -> tuple[TokenIds, ...]:
    """What the model reads: pairs, or the query and then the documents."""
    if model.is_cross_encoder:
        return encode_pairs(body.query, documents, model, body.truncate_prompt_tokens)
    names = ["query", *(f"documents[{i}]" for i in range(len(documents)))]
    return encode_inputs([body.query, *documents], model, body.truncate_prompt_tokens, names)
