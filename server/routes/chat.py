"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.adapters import chat as adapter
from server.adapters.reply import new_reply
from server.app_state import app_state
from server.errors import InvalidRequest
from server.old_functions import in_old_words, uses_functions, with_tools
from server.openapi import json_body
from server.protocol import ChatBody
from server.refusals import refuse_in_chat
from server.routes.answer import answer
from server.routes.body import read_json

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None, openapi_extra=json_body(ChatBody))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, as one body or as an event stream."""
    value = await read_json(request)
    if not uses_functions(value):
        return await _answer_chat(request, value, in_old_form=False)
    try:
        return await _answer_chat(request, with_tools(value), in_old_form=True)
    except InvalidRequest as error:
        raise in_old_words(error) from error


async def _answer_chat(request: Request, value: dict[str, Any], *, in_old_form: bool) -> Response:
    state = app_state(request)
    refuse_in_chat(value)
    body = state.reader.read(ChatBody, value)
    model = state.models.get(body.model)
    reply = adapter.ChatReply(
        head=new_reply("chatcmpl", model, body.service_tier),
        tokenizer=model.tokenizer,
        num_choices=body.n,
        wants_logprobs=body.logprobs,
        includes_usage=body.includes_usage,
        includes_reasoning=body.include_reasoning,
        in_old_form=in_old_form,
    )
    spec = await adapter.to_generation_spec(body, model, reply, state.context(request))
    return await answer(
        request,
        model,
        spec,
        stream=partial(adapter.stream_chunks, reply=reply) if body.stream else None,
        collect=partial(adapter.collect_response, reply=reply),
    )
