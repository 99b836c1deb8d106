"""The Responses dialect: POST /v1/responses in OpenAI's shape.

A request becomes a chat request (`to_chat_value`), so prompts, tools, structured output and
sampling are chat's own; errors are told in the words of this dialect (`in_own_words`). The event
union becomes typed stream events with running numbers, or one body. A stream ends with
`response.completed`, `response.incomplete` (the token limit) or `response.failed`; there is no
`[DONE]`. `Reply.keep` gets every response that ended, before its last event is sent.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from server.adapters.logprobs import chat_entries
from server.adapters.reply import json_text
from server.adapters.response_output import Events, ResponseOutput
from server.errors import ApiError, InvalidRequest
from server.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from server.response_items import Item, chat_messages
from server.responses_protocol import ResponseBody
from server.tokenizer import Tokenizer

Batches = AsyncIterator[list[Event]]
Keep = Callable[[dict[str, Any]], None]

_ONLY_IN_CHAT = frozenset(
    {"messages", "n", "max_tokens", "max_completion_tokens", "logprobs", "response_format"}
    | {"functions", "function_call", "return_token_ids", "echo"}
)
"""Unknown to Responses, so they are ignored there as every unknown field is."""

_OWN_WORDS = (
    (re.compile(r"\bmessages\b"), "input"),
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"\b(tools\[\d+\]|tool_choice)\.function\b"), r"\1"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
)
_QUOTED = re.compile(r"'[^']*'")


@dataclass(frozen=True, slots=True)
class ResponseReply:
    """How one request wants to be answered. `created` is in Unix seconds."""

    id: str
    created: int
    model: str
    body: ResponseBody
    tokenizer: Tokenizer
    service_tier: str
    keep: Keep


def to_chat_value(value: dict[str, Any], body: ResponseBody, items: list[Item]) -> dict[str, Any]:
    """The JSON of the chat request that asks for the same. Raises InvalidRequest.

    `value` is the request as it came: fields that Responses does not define (`top_k`, `priority`,
    `cache_salt`, …) mean what they mean in chat.
    """
    own = ResponseBody.model_fields.keys() | _ONLY_IN_CHAT
    chat = {name: item for name, item in value.items() if name not in own}
    chat |= {
        "model": body.model,
        "messages": chat_messages(body.instructions, items),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "service_tier": body.service_tier,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
    }
    if body.wants_logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    tools, choice = _chat_tools(body)
    if tools:
        chat |= {"tools": tools, "tool_choice": choice}
    elif choice not in ("auto", "none"):
        raise InvalidRequest("'tool_choice' asks for a tool, but there are none.", param="tools")
    return chat


def in_own_words(error: InvalidRequest) -> InvalidRequest:
    """An error about the chat request, with the fields named as the client wrote them."""
    if error.param is not None:
        error.param = _renamed(error.param)
    error.message = _QUOTED.sub(lambda match: _renamed(match[0]), error.message)
    return error


async def stream_chunks(batches: Batches, reply: ResponseReply) -> AsyncIterator[bytes]:
    """The whole event stream, one piece per batch of events."""
    writer = FrameWriter()
    fold = ResponseFold(reply)
    yield b"".join(writer.frames(fold.begin()))
    try:
        async for batch in batches:
            if events := fold.take(batch):
                yield b"".join(writer.frames(events))
    except ApiError as error:
        yield b"".join(writer.frames(fold.fail(error)))


async def collect_response(batches: Batches, reply: ResponseReply) -> dict[str, Any]:
    """The same events folded into one body."""
    fold = ResponseFold(reply)
    async for batch in batches:
        fold.take(batch)
    return fold.response


class ResponseFold:
    """The state of one response; `response` is its body at any time."""

    def __init__(self, reply: ResponseReply) -> None:
        self._reply = reply
        self._output = ResponseOutput()
        self._finish_reason = ""
        self.response = response_object(reply)

    def begin(self) -> Events:
        return [
            {"type": f"response.{phase}", "response": self.response}
            for phase in ("created", "in_progress")
        ]

    def take(self, batch: list[Event]) -> Events:
        events: Events = []
        for event in batch:
            events += self._take(event)
        return events

    def fail(self, error: ApiError) -> Events:
        """End with an error. The wire's `code` has a fixed list; `type` says which error it is."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        told = {"code": code, "message": error.message, "type": error.type, "param": error.param}
        return self._end("failed", {"error": told})

    def cancel(self) -> Events:
        """End as cancelled, with what was generated so far. No event has that name at OpenAI: the
        last one says `incomplete`, which every client knows for an end."""
        events = self._end("cancelled", {})
        return [*events[:-1], events[-1] | {"type": "response.incomplete"}]

    def _take(self, event: Event) -> Events:
        match event:
            case TextDelta(_, text, logprobs):
                return self._add_text(text, logprobs)
            case ReasoningDelta(_, text):
                return self._output.add_reasoning(text)
            case ToolCallStart(_, _, call_id, name):
                return self._output.start_call(call_id, name)
            case ToolCallArguments(_, _, text):
                return self._output.add_arguments(text)
            case Finished(_, reason):
                self._finish_reason = reason
                return self._finish_output()
            case Usage():
                return self._finish(event)
        return []

    def _add_text(self, text: str, logprobs: tuple[Any, ...]) -> Events:
        entries = []
        if self._reply.body.wants_logprobs:
            entries = chat_entries(self._reply.tokenizer, logprobs)
        return self._output.add_text(text, entries) if text or entries else []

    def _finish_output(self) -> Events:
        events = self._output.ensure_message()
        cut = self._finish_reason == "length"
        return events + self._output.close("incomplete" if cut else "completed")

    def _finish(self, usage: Usage) -> Events:
        fields: dict[str, Any] = {"usage": _usage_object(usage)}
        if self._finish_reason == "length":
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
            return self._end("incomplete", fields)
        return self._end("completed", fields | {"completed_at": int(time.time())})

    def _end(self, status: str, fields: dict[str, Any]) -> Events:
        events = self._output.close("incomplete")
        output = self._output.items
        self.response = {**self.response, "status": status, "output": output, **fields}
        self._reply.keep(self.response)
        return [*events, {"type": f"response.{status}", "response": self.response}]


def response_object(reply: ResponseReply) -> dict[str, Any]:
    """The body of a response that has just begun. Fields of the request are echoed."""
    body = reply.body
    return {
        "id": reply.id,
        "object": "response",
        "created_at": reply.created,
        "status": "in_progress",
        "background": body.background,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata,
        "model": reply.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": _reasoning_object(body),
        "safety_identifier": body.safety_identifier,
        "service_tier": reply.service_tier,
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": _echoed_format(body), "verbosity": "medium"},
        "tool_choice": body.tool_choice,
        "tools": body.tools,
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": body.truncation,
        "usage": None,
        "user": body.user,
    }


class FrameWriter:
    """Numbers the events of one stream and writes them as OpenAI does, with an `event:` line."""

    def __init__(self) -> None:
        self._next_number = 0

    def frames(self, events: Events) -> list[bytes]:
        return [self._frame(event) for event in events]

    def _frame(self, event: dict[str, Any]) -> bytes:
        text = json_text({**event, "sequence_number": self._next_number})
        self._next_number += 1
        return f"event: {event['type']}\ndata: {text}\n\n".encode()


def _usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _reasoning_object(body: ResponseBody) -> dict[str, Any]:
    reasoning = body.reasoning
    return {
        "effort": reasoning.effort if reasoning else None,
        "summary": reasoning.summary if reasoning else None,
    }


def _echoed_format(body: ResponseBody) -> dict[str, Any]:
    """Clients read a name of every schema, though none is needed here."""
    given = body.text.format or {"type": "text"}
    return {"name": "response", **given} if given.get("type") == "json_schema" else given


def _response_format(body: ResponseBody) -> dict[str, Any] | None:
    given = body.text.format
    if given is None or given.get("type") != "json_schema":
        return given
    if not isinstance(given.get("schema"), dict):
        raise InvalidRequest("'text.format.schema' must be an object.", param="text.format.schema")
    return {
        "type": "json_schema",
        "json_schema": {name: item for name, item in given.items() if name != "type"},
    }


def _chat_tools(body: ResponseBody) -> tuple[list[dict[str, Any]], Any]:
    """Tools and choice in chat's form; `allowed_tools` leaves only those tools."""
    tools = [_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    choice = body.tool_choice
    if not isinstance(choice, dict):
        return tools, choice
    match choice.get("type"):
        case "function":
            return tools, {"type": "function", "function": {"name": choice.get("name")}}
        case "allowed_tools":
            return _allowed(tools, choice), choice.get("mode", "auto")
    raise InvalidRequest(
        f"'tool_choice' is of the type '{str(choice.get('type'))[:80]}', which is not served; "
        "types are function and allowed_tools.",
        param="tool_choice",
    )


def _chat_tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise InvalidRequest(
            f"'{where}' is of the type '{str(kind)[:80]}', which is not served: there are no "
            "built-in tools here, only functions of the client.",
            param=f"{where}.type",
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {n: tool[n] for n in names if n in tool}}


def _allowed(tools: list[dict[str, Any]], choice: dict[str, Any]) -> list[dict[str, Any]]:
    allowed = choice.get("tools")
    if not isinstance(allowed, list) or not all(isinstance(tool, dict) for tool in allowed):
        raise InvalidRequest("'tool_choice.tools' must be a list.", param="tool_choice.tools")
    names = [tool.get("name") for tool in allowed]
    return [tool for tool in tools if tool["function"].get("name") in names]


def _renamed(path: str) -> str:
    for pattern, own in _OWN_WORDS:
        path = pattern.sub(own, path)
    return path
