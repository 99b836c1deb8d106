"""The chat dialect: POST /v1/chat/completions in OpenAI's shape.

Three functions over the one event union: a body to the engine's words, events to chunks, events
to one body. On the wire every choice's first chunk carries the role (index 0 before index 1), its
last one an empty delta and the finish reason; usage, if asked for, comes last with no choices.
An answer of `max_tokens` 0 is empty and ends with `length`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from server.adapters.logprobs import chat_entries
from server.adapters.reply import DONE, ReplyHead, frame, json_text, usage_object
from server.errors import InvalidRequest
from server.events import Event, Finished, TextDelta, Usage
from server.generation import GenerationSpec
from server.messages import read_messages
from server.prompt import PromptOptions, RenderedPrompt
from server.protocol import ChatBody, TokenizeBody
from server.request_context import RequestContext
from server.sampling import RequestOptions, generation_spec
from server.served_model import ServedModel
from server.tokenizer import Tokenizer

Batches = AsyncIterator[list[Event]]


@dataclass(frozen=True, slots=True)
class ChatReply:
    """How one chat request wants to be answered."""

    head: ReplyHead
    tokenizer: Tokenizer
    num_choices: int
    wants_logprobs: bool
    includes_usage: bool


async def to_generation_spec(
    body: ChatBody, model: ServedModel, reply: ChatReply, context: RequestContext
) -> GenerationSpec:
    """Render, encode and check. Raises InvalidRequest."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(
            "'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs"
        )
    prompt, token_ids = await asyncio.to_thread(render_chat, body, model)
    options = RequestOptions(
        request_id=reply.head.id,
        prompt_param="messages",
        max_tokens=body.token_limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        strips_leading_space=model.tokenizer.strips_leading_space and not prompt.continues,
        cache_scope=context.cache_scope,
        timeout_s=context.timeout_s,
        arrival_s=context.arrival_s,
    )
    return generation_spec(body, model, [token_ids], options)


def render_chat(
    body: ChatBody | TokenizeBody, model: ServedModel
) -> tuple[RenderedPrompt, list[int]]:
    """The prompt of a chat and its ids. Slow in the worst case: call it in a worker thread."""
    options = PromptOptions(
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_variables=body.chat_template_kwargs,
    )
    prompt = model.renderer.render(read_messages(body.messages), options)
    return prompt, prompt.encode(model.tokenizer)


async def stream_chunks(batches: Batches, reply: ChatReply) -> AsyncIterator[bytes]:
    """The whole event stream, one piece per batch of events."""
    writer = _ChunkWriter(reply)
    async for batch in batches:
        if piece := writer.write(batch):
            yield piece
    yield DONE


async def collect_response(batches: Batches, reply: ChatReply) -> dict[str, Any]:
    """The same events folded into one body."""
    choices = [_ChoiceFold() for _ in range(reply.num_choices)]
    usage: Usage | None = None
    async for batch in batches:
        for event in batch:
            match event:
                case TextDelta(index, text, logprobs):
                    choices[index].texts.append(text)
                    choices[index].logprobs += chat_entries(reply.tokenizer, logprobs)
                case Finished(index, reason):
                    choices[index].finish_reason = reason
                case Usage():
                    usage = event
    assert usage is not None, "the events ended without a usage"
    return {
        **reply.head.fields("chat.completion"),
        "choices": [choice.body(i, reply.wants_logprobs) for i, choice in enumerate(choices)],
        "usage": usage_object(usage),
    }


class _ChoiceFold:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.finish_reason = ""

    def body(self, index: int, wants_logprobs: bool) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(self.texts), "refusal": None},
            "logprobs": _logprobs_object(self.logprobs) if wants_logprobs else None,
            "finish_reason": self.finish_reason,
        }


class _ChunkWriter:
    """Writes chunks by putting pieces between texts that are made once per request."""

    def __init__(self, reply: ChatReply) -> None:
        self._reply = reply
        head = json_text(reply.head.fields("chat.completion.chunk"))[:-1]
        self._before = f'{head},"choices":[{{"index":'
        self._after = '}],"usage":null}' if reply.includes_usage else "}]}"
        self._usage_before = f'{head},"choices":[],"usage":'
        self._has_begun = False

    def write(self, batch: list[Event]) -> bytes:
        frames = [] if self._has_begun else self._roles()
        self._has_begun = True
        for event in batch:
            match event:
                case TextDelta(index, text, logprobs):
                    frames.append(self._delta(index, text, logprobs))
                case Finished(index, reason):
                    frames.append(self._choice(index, "{}", "null", f'"{reason}"'))
                case Usage() if self._reply.includes_usage:
                    usage = json_text(usage_object(event))
                    frames.append(frame(f"{self._usage_before}{usage}}}"))
        return b"".join(frames)

    def _roles(self) -> list[bytes]:
        delta = '{"role":"assistant","content":"","refusal":null}'
        return [self._choice(i, delta, "null", "null") for i in range(self._reply.num_choices)]

    def _delta(self, index: int, text: str, logprobs: tuple[Any, ...]) -> bytes:
        written = "null"
        if self._reply.wants_logprobs:
            entries = chat_entries(self._reply.tokenizer, logprobs)
            written = json_text(_logprobs_object(entries))
        return self._choice(index, f'{{"content":{json_text(text)}}}', written, "null")

    def _choice(self, index: int, delta: str, logprobs: str, finish_reason: str) -> bytes:
        return frame(
            f'{self._before}{index},"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":{finish_reason}{self._after}'
        )


def _logprobs_object(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": entries, "refusal": None}
