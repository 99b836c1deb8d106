"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.adapters.embeddings import check_dimensions, embeddings_body, shortened
from server.app_state import app_state
from server.embedding_inputs import encode_inputs, input_names, read_inputs
from server.embedding_protocol import EmbeddingBody, refuse_in_embeddings
from server.openapi import json_body
from server.routes.body import read_json
from server.routes.embed import device_header, embed

router = APIRouter()


@router.post("/v1/embeddings", response_model=None, openapi_extra=json_body(EmbeddingBody))
async def embeddings(request: Request) -> Response:
    """A vector of length 1 for each text."""
    state = app_state(request)
    value = await read_json(request)
    refuse_in_embeddings(value)
    body = state.reader.read(EmbeddingBody, value)
    model = state.models.get_embedder(body.model)
    dimensions = check_dimensions(body.dimensions, model)
    inputs = read_inputs(body.input)
    token_ids = await asyncio.to_thread(
        encode_inputs, inputs, model, body.truncate_prompt_tokens, input_names(inputs)
    )
    vectors = await embed(request, model, token_ids)
    answer = await asyncio.to_thread(
        embeddings_body,
        shortened(vectors, dimensions),
        body.encoding_format,
        model,
        sum(map(len, token_ids)),
    )
    return Response(answer, media_type="application/json", headers=device_header(model))
