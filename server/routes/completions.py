"""POST /v1/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.adapters import completions as adapter
from server.adapters.reply import new_reply
from server.app_state import app_state
from server.openapi import json_body
from server.protocol import CompletionBody
from server.refusals import refuse_in_completions
from server.routes.answer import answer
from server.routes.body import read_json

router = APIRouter()


@router.post("/v1/completions", response_model=None, openapi_extra=json_body(CompletionBody))
async def completions(request: Request) -> Response:
    """Continue one or several prompts, as one body or as an event stream."""
    state = app_state(request)
    value = await read_json(request)
    refuse_in_completions(value)
    body = state.reader.read(CompletionBody, value)
    model = state.models.get(body.model)
    head = new_reply("cmpl", model, body.service_tier)
    spec, reply = await adapter.to_generation_spec(body, model, head, state.context(request))
    return await answer(
        request,
        model,
        spec,
        stream=partial(adapter.stream_chunks, reply=reply) if body.stream else None,
        collect=partial(adapter.collect_response, reply=reply),
    )
