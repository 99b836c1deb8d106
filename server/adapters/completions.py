"""The completions dialect: POST /v1/completions in OpenAI's legacy shape.

Three functions over the one event union, as in `chat.py`. `echo` puts the prompt's text, and with
`logprobs` its tokens' logprobs, before the answer's; the first token's logprob is null.
Index = prompt number * n + choice number.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from server.adapters.logprobs import LegacyLogprobs, join_legacy
from server.adapters.reply import DONE, ReplyHead, frame, json_text, usage_object
from server.adapters.token_ids import TokenIdFields, joined_ids
from server.completion_prompts import encode_prompts, read_prompts
from server.events import (
    Event,
    Finished,
    PromptScored,
    PromptTokens,
    TextDelta,
    TokenIds,
    Usage,
)
from server.generation import GenerationSpec
from server.limits import DEFAULT_COMPLETION_TOKENS
from server.protocol import CompletionBody
from server.request_context import RequestContext
from server.sampling import RequestOptions, generation_spec, truncated
from server.served_model import ServedModel
from server.structured_request import compile_constraint, read_constraint
from server.tokenizer import Tokenizer

Batches = AsyncIterator[list[Event]]


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt as it is given back. `text` has no control token that the server added."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """How one request wants to be answered. `echoed` holds a prompt per choice, or nothing."""

    head: ReplyHead
    tokenizer: Tokenizer
    num_choices: int
    wants_logprobs: bool
    includes_usage: bool
    echoed: tuple[EchoedPrompt, ...] = ()


async def to_generation_spec(
    body: CompletionBody, model: ServedModel, head: ReplyHead, context: RequestContext
) -> tuple[GenerationSpec, CompletionReply]:
    """Encode and check. Raises InvalidRequest."""
    prompts = read_prompts(body.prompt)
    constraint = read_constraint(body)
    encoded = await asyncio.to_thread(encode_prompts, prompts, model)
    grammar = ""
    if constraint is not None:
        grammar = await asyncio.to_thread(compile_constraint, constraint, model.grammars)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    # What is echoed and scored is what the model saw.
    seen = truncated(encoded, body, model, max_tokens)
    options = RequestOptions(
        request_id=head.id,
        prompt_param="prompt",
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        keeps_every_logprob=True,
        grammar=grammar,
        cache_scope=context.cache_scope,
        timeout_s=context.timeout_s,
        highest_priority=context.highest_priority,
        arrival_s=context.arrival_s,
    )
    spec = generation_spec(body, model, seen, options)
    echoed = [
        EchoedPrompt(
            prompt
            if isinstance(prompt, str) and len(token_ids) == len(whole)
            else model.tokenizer.decode(list(token_ids)),
            tuple(token_ids),
        )
        for prompt, whole, token_ids in zip(prompts, encoded, seen, strict=True)
    ]
    reply = CompletionReply(
        head=head,
        tokenizer=model.tokenizer,
        num_choices=len(spec.choices),
        wants_logprobs=body.logprobs is not None,
        includes_usage=body.includes_usage,
        echoed=tuple(echoed[c.prompt_index] for c in spec.choices) if body.echo else (),
    )
    return spec, reply


async def stream_chunks(batches: Batches, reply: CompletionReply) -> AsyncIterator[bytes]:
    """The whole event stream, one piece per batch of events."""
    writer = _Writer(reply)
    head = reply.head.fields("text_completion")
    usage_null = {"usage": None} if reply.includes_usage else {}
    async for batch in batches:
        frames = [
            frame(json_text({**head, "choices": [choice], **usage_null}))
            for choice in writer.choices(batch)
        ]
        if reply.includes_usage and isinstance(batch[-1], Usage):
            body = {**head, "choices": [], "usage": usage_object(batch[-1])}
            frames.append(frame(json_text(body)))
        if frames:
            yield b"".join(frames)
    yield DONE


async def collect_response(batches: Batches, reply: CompletionReply) -> dict[str, Any]:
    """The same choices folded into one body."""
    writer = _Writer(reply)
    pieces: list[list[dict[str, Any]]] = [[] for _ in range(reply.num_choices)]
    usage: Usage | None = None
    async for batch in batches:
        for choice in writer.choices(batch):
            pieces[choice["index"]].append(choice)
        if isinstance(batch[-1], Usage):
            usage = batch[-1]
    assert usage is not None, "the events ended without a usage"
    return {
        **reply.head.fields("text_completion"),
        "choices": [_fold(index, parts) for index, parts in enumerate(pieces)],
        "usage": usage_object(usage),
    }


class _Writer:
    """Turns events into choice objects, in order; the echoed prompt goes before all else."""

    def __init__(self, reply: CompletionReply) -> None:
        self._reply = reply
        self._logprobs = [LegacyLogprobs(reply.tokenizer) for _ in range(reply.num_choices)]
        self._not_echoed = set(range(len(reply.echoed)))
        self._ids = TokenIdFields()

    def choices(self, batch: list[Event]) -> list[dict[str, Any]]:
        written: list[dict[str, Any]] = []
        for event in batch:
            match event:
                case PromptTokens() | TokenIds():
                    self._ids.take(event)
                case PromptScored(index, logprobs) if index in self._not_echoed:
                    written.append(self._echo(index, logprobs))
                case TextDelta(index, text, logprobs):
                    written += self._echo_once(index)
                    lists = None
                    if self._reply.wants_logprobs:
                        lists = self._logprobs[index].take(logprobs)
                    written.append(_choice(index, text, lists, None) | self._ids.fields(index))
                case Finished(index, reason):
                    written += self._echo_once(index)
                    written.append(_choice(index, "", None, reason) | self._ids.fields(index))
        return written

    def _echo_once(self, index: int) -> list[dict[str, Any]]:
        return [self._echo(index, ())] if index in self._not_echoed else []

    def _echo(self, index: int, logprobs: tuple[Any, ...]) -> dict[str, Any]:
        self._not_echoed.discard(index)
        prompt = self._reply.echoed[index]
        lists = None
        if self._reply.wants_logprobs and logprobs:
            lists = self._logprobs[index].take_prompt(prompt.token_ids, logprobs, len(prompt.text))
        return _choice(index, prompt.text, lists, None)


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _fold(index: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    logprobs = join_legacy([part["logprobs"] for part in parts if part["logprobs"] is not None])
    text = "".join(part["text"] for part in parts)
    return _choice(index, text, logprobs, parts[-1]["finish_reason"]) | joined_ids(parts)
