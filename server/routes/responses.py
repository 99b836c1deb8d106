"""/v1/responses: create, retrieve, delete, cancel, count, and list what a response was made from.

What a response needs of earlier ones (`previous_response_id`, item references) is looked up here;
the rest of the way is chat's. Stored responses belong to the API key that made them: to every
other key they do not exist.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from server.adapters import chat
from server.adapters import responses as adapter
from server.adapters.reply import json_bytes, new_reply
from server.adapters.response_output import Events
from server.app_state import AppState, app_state, scope_of
from server.errors import ApiError, GenerationFailed, InvalidRequest, ResponseNotFound
from server.generation import Generation, GenerationSpec
from server.openapi import json_body
from server.protocol import ChatBody
from server.refusals import refuse_in_chat
from server.response_fitting import longest_prompt, prepare_fitting
from server.response_items import Item, read_items
from server.response_log import ResponseLog
from server.response_store import StoredResponse
from server.responses_protocol import (
    ResponseBody,
    check_include,
    check_response_body,
    check_responses_fields,
    check_retrieval,
)
from server.routes.answer import answer, device_header, submitted
from server.routes.body import read_json
from server.served_model import ServedModel
from server.sse import EventStream

logger = logging.getLogger(__name__)

router = APIRouter()

Include = Annotated[list[str] | None, Query()]
IncludeInBrackets = Annotated[list[str] | None, Query(alias="include[]")]


@router.post("/v1/responses", response_model=None, openapi_extra=json_body(ResponseBody))
async def create_response(request: Request) -> Response:
    """Answer an input, as one body, as a stream of typed events, or in the background."""
    state = app_state(request)
    value, body = await _read(request)
    model = state.models.get(body.model)
    items = _all_items(state, scope_of(request), body)
    spec, reply = await _prepare(request, value, body, model, items)
    if body.background:
        return await _start_in_background(request, model, spec, reply, items)
    return await answer(
        request,
        model,
        spec,
        stream=partial(adapter.stream_chunks, reply=reply) if body.stream else None,
        collect=partial(adapter.collect_response, reply=reply),
    )


@router.get("/v1/responses/{response_id}", response_model=None)
async def retrieve_response(
    request: Request,
    response_id: str,
    include: Include = None,
    include_in_brackets: IncludeInBrackets = None,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0)] = None,
    include_obfuscation: bool = False,
) -> Response:
    """As it is now: a background response may still be in progress. With `stream`, its events
    behind number `starting_after`, those to come included."""
    check_include([*(include or ()), *(include_in_brackets or ())])
    check_retrieval(stream, starting_after, include_obfuscation)
    stored = _find(request, response_id)
    if not stream:
        return Response(stored.response, media_type="application/json")
    if stored.log is None:
        raise InvalidRequest(
            "Only a response that was created with both 'background' and 'stream' can be "
            "streamed again: the events of others are not kept.",
            param="stream",
        )
    first = 0 if starting_after is None else starting_after + 1
    return _log_stream(request, stored.log, first)


@router.post(
    "/v1/responses/input_tokens", response_model=None, openapi_extra=json_body(ResponseBody)
)
async def count_input_tokens(request: Request) -> dict[str, Any]:
    """How many tokens the prompt of such a request would have, whether it fits or not."""
    state = app_state(request)
    value, body = await _read(request)
    model = state.models.get(body.model)
    items = _all_items(state, scope_of(request), body)
    try:
        chat_body = _chat_body(state, value, body, items)
        num_tokens = await asyncio.to_thread(chat.count_prompt_tokens, chat_body, model)
    except InvalidRequest as error:
        raise adapter.in_own_words(error) from error
    return {"object": "response.input_tokens", "input_tokens": num_tokens}


@router.delete("/v1/responses/{response_id}", response_model=None)
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    """A response in progress is cancelled first."""
    state = app_state(request)
    stored = _find(request, response_id)
    await state.background.cancel(stored.id)
    state.responses.delete(stored.scope, stored.id)
    return {"id": stored.id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel_response(request: Request, response_id: str) -> Response:
    """End a background response; one that has ended is returned as it is."""
    stored = _find(request, response_id)
    if not stored.body()["background"]:
        raise InvalidRequest(
            "Only responses that were created with 'background' can be cancelled. Close the "
            "connection of any other to end it.",
            param="response_id",
        )
    await app_state(request).background.cancel(stored.id)
    stored = _find(request, response_id)
    return Response(stored.response, media_type="application/json")


@router.get("/v1/responses/{response_id}/input_items", response_model=None)
async def list_input_items(
    request: Request,
    response_id: str,
    include: Include = None,
    include_in_brackets: IncludeInBrackets = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> dict[str, Any]:
    """Everything that led to the response, earlier responses included, a page at a time."""
    check_include([*(include or ()), *(include_in_brackets or ())])
    items = _find(request, response_id).input_items()
    if order == "desc":
        items.reverse()
    if after is not None:
        items = items[_position(items, after) + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }


async def _read(request: Request) -> tuple[dict[str, Any], ResponseBody]:
    """The request as it came, and checked."""
    value = await read_json(request)
    check_responses_fields(value)
    body = app_state(request).reader.read(ResponseBody, value)
    check_response_body(body)
    return value, body


async def _prepare(
    request: Request,
    value: dict[str, Any],
    body: ResponseBody,
    model: ServedModel,
    items: list[Item],
) -> tuple[GenerationSpec, adapter.ResponseReply]:
    """The same request as chat's own words, checked as chat checks it. Raises InvalidRequest."""
    state = app_state(request)
    head = new_reply("resp", model, body.service_tier)
    reply = adapter.ResponseReply(
        id=f"resp_{secrets.token_hex(16)}",
        created=int(time.time()),
        model=model.name,
        body=body,
        tokenizer=model.tokenizer,
        service_tier=head.service_tier or "default",
        keep=_keeper(state, scope_of(request), body, items),
    )
    chat_reply = chat.ChatReply(head, model.tokenizer, 1, body.wants_logprobs, False)

    async def prepare(shown: list[Item]) -> GenerationSpec:
        chat_body = _chat_body(state, value, body, shown)
        return await chat.to_generation_spec(chat_body, model, chat_reply, state.context(request))

    try:
        if body.truncation == "disabled":
            return await prepare(items), reply
        longest = longest_prompt(model.context_limit, body.max_output_tokens)
        return await prepare_fitting(items, prepare, longest), reply
    except InvalidRequest as error:
        raise adapter.in_own_words(error) from error


def _chat_body(
    state: AppState, value: dict[str, Any], body: ResponseBody, items: list[Item]
) -> ChatBody:
    """Raises InvalidRequest in chat's words."""
    chat_value = adapter.to_chat_value(value, body, items)
    refuse_in_chat(chat_value)
    return state.reader.read(ChatBody, chat_value)


def _all_items(state: AppState, scope: str, body: ResponseBody) -> list[Item]:
    """The items of the responses before, and those of this request."""
    earlier: list[Item] = []
    if body.previous_response_id is not None:
        earlier = _previous(state, scope, body.previous_response_id).conversation()
    if body.input is None and not earlier:
        raise InvalidRequest("'input' is required.", param="input")
    value = [] if body.input is None else body.input
    return earlier + read_items(value, earlier, partial(state.responses.find_item, scope))


def _previous(state: AppState, scope: str, response_id: str) -> StoredResponse:
    stored = state.responses.get(scope, response_id)
    if stored is None:
        raise InvalidRequest(
            f"Previous response with id '{response_id[:80]}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if stored.in_progress:
        raise InvalidRequest(
            f"Previous response with id '{stored.id}' is still in progress.",
            param="previous_response_id",
        )
    return stored


def _keeper(state: AppState, scope: str, body: ResponseBody, items: list[Item]) -> adapter.Keep:
    def keep(response: dict[str, Any]) -> None:
        if body.store:
            state.responses.put(scope, response, items)

    return keep


async def _start_in_background(
    request: Request,
    model: ServedModel,
    spec: GenerationSpec,
    reply: adapter.ResponseReply,
    items: list[Item],
) -> Response:
    state = app_state(request)
    state.background.check_room()
    generation = await submitted(request, model, spec)
    fold = adapter.ResponseFold(reply)
    log = ResponseLog() if reply.body.stream else None
    state.responses.put(scope_of(request), fold.response, items, in_progress=True, log=log)
    state.background.start(reply.id, _run(generation, fold, log))
    if log is not None:
        return _log_stream(request, log, 0, device_header(model))
    return Response(
        json_bytes(fold.response),
        media_type="application/json",
        headers=device_header(model, tuple(generation.devices)),
    )


async def _run(generation: Generation, fold: adapter.ResponseFold, log: ResponseLog | None) -> None:
    """Fold the events; the fold keeps the response in whatever way it ends."""
    writer = adapter.FrameWriter()

    def tell(events: Events) -> None:
        if log is not None:
            log.append(writer.frames(events))

    try:
        tell(fold.begin())
        async for batch in generation.batches():
            tell(fold.take(batch))
    except ApiError as error:
        tell(fold.fail(error))
    except asyncio.CancelledError:
        tell(fold.cancel())
        raise
    except Exception:  # nobody awaits this task: the stored response has to tell
        logger.exception("a background response failed")
        tell(fold.fail(GenerationFailed("The server failed while it made the answer.")))
    finally:
        if log is not None:
            log.end()
        await generation.aclose()


def _log_stream(
    request: Request, log: ResponseLog, first: int, headers: dict[str, str] | None = None
) -> EventStream:
    """Whoever leaves it leaves the response running."""
    interval_s = app_state(request).settings.keep_alive_interval_s
    return EventStream(
        log.follow(first), _nothing_to_close, keep_alive_interval_s=interval_s, headers=headers
    )


async def _nothing_to_close() -> None:
    pass


def _find(request: Request, response_id: str) -> StoredResponse:
    stored = app_state(request).responses.get(scope_of(request), response_id)
    if stored is None:
        raise ResponseNotFound(response_id)
    return stored


def _position(items: list[Item], item_id: str) -> int:
    for i, item in enumerate(items):
        if item["id"] == item_id:
            return i
    raise InvalidRequest(f"Item with id '{item_id[:80]}' not found.", param="after")
