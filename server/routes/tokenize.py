"""POST /tokenize and /detokenize, in vLLM's shapes: what the model really sees.

For models of both kinds. An embedding model has no chat template: it takes a `prompt` only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request

from server.adapters.chat import render_chat
from server.adapters.logprobs import token_name
from server.answer_plan import PromptPlan
from server.app_state import app_state
from server.errors import InvalidRequest
from server.model_registry import Served, model_of_any_kind
from server.openapi import json_body
from server.protocol import DetokenizeBody, TokenizeBody
from server.routes.body import read_json
from server.sampling import check_token_ids
from server.served_embedder import ServedEmbedder
from server.tools import read_tool_request

router = APIRouter()


@router.post("/tokenize", response_model=None, openapi_extra=json_body(TokenizeBody))
async def tokenize(request: Request) -> dict[str, Any]:
    """The ids of a `prompt`, or of `messages` after the chat template."""
    state = app_state(request)
    body = state.reader.read(TokenizeBody, await read_json(request))
    model = model_of_any_kind(state.models, body.model)
    token_ids = await asyncio.to_thread(_encode, body, model)
    return {
        "count": len(token_ids),
        "max_model_len": model.context_limit,
        "tokens": token_ids,
        "token_strs": _names(token_ids, model) if body.return_token_strs else None,
    }


@router.post("/detokenize", response_model=None, openapi_extra=json_body(DetokenizeBody))
async def detokenize(request: Request) -> dict[str, Any]:
    state = app_state(request)
    body = state.reader.read(DetokenizeBody, await read_json(request))
    model = model_of_any_kind(state.models, body.model)
    check_token_ids(body.tokens, model, "tokens")
    return {"prompt": await asyncio.to_thread(model.tokenizer.decode, body.tokens)}


def _encode(body: TokenizeBody, model: Served) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either 'prompt' or 'messages'.", param="prompt")
    if isinstance(model, ServedEmbedder):
        return list(_encode_text(body, model))
    if body.prompt is not None:
        return model.tokenizer.encode_parsed(body.prompt, add_bos=body.add_special_tokens)
    plan = PromptPlan(read_tool_request(body.tools, None, None))
    _, token_ids = render_chat(body, model, plan)
    return token_ids


def _encode_text(body: TokenizeBody, model: ServedEmbedder) -> tuple[int, ...]:
    if body.prompt is None:
        raise InvalidRequest(
            f"{model.name} is an embedding model and has no chat template; give a 'prompt'.",
            param="messages",
        )
    if body.add_special_tokens:
        return model.tokenizer.encode(body.prompt)
    return model.tokenizer.encode_bare(body.prompt)


def _names(token_ids: Sequence[int], model: Served) -> list[str]:
    if isinstance(model, ServedEmbedder):
        return [model.tokenizer.token_text(i) for i in token_ids]
    return [token_name(model.tokenizer, i) for i in token_ids]
