"""The chat dialect: POST /v1/chat/completions in OpenAI's shape.

Three functions over the one event union: a body to the engine's words, events to chunks, events
to one body. On the wire every choice's first chunk carries the role (index 0 before index 1), its
last one an empty delta and the finish reason; usage, if asked for, comes last with no choices.
An answer of `max_tokens` 0 is empty and ends with `length`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from server.adapters.chat_message import (
    MessageFold,
    call_delta,
    finish_reason,
    old_call_delta,
    reasoning_delta,
)
from server.adapters.logprobs import chat_entries
from server.adapters.reply import DONE, ReplyHead, frame, json_text, usage_object
from server.adapters.token_ids import TokenIdFields
from server.answer_grammar import answer_grammar
from server.answer_plan import AnswerPlan, PromptPlan, plan_answer, plan_prompt
from server.errors import InvalidRequest
from server.events import (
    Event,
    Finished,
    PromptTokens,
    ReasoningDelta,
    TextDelta,
    TokenIds,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from server.generation import GenerationSpec
from server.messages import read_messages
from server.prompt import PromptOptions, RenderedPrompt
from server.protocol import ChatBody, TokenizeBody
from server.reasoning import starts_inside
from server.request_context import RequestContext
from server.sampling import RequestOptions, generation_spec
from server.schema_prompt import with_schema
from server.served_model import ServedModel
from server.structured_request import read_constraint
from server.thinking_budget import CLOSING
from server.tokenizer import Tokenizer

Batches = AsyncIterator[list[Event]]


@dataclass(frozen=True, slots=True)
class ChatReply:
    """How one chat request wants to be answered. `in_old_form`: calls as `function_call`."""

    head: ReplyHead
    tokenizer: Tokenizer
    num_choices: int
    wants_logprobs: bool
    includes_usage: bool
    includes_reasoning: bool = True
    in_old_form: bool = False


async def to_generation_spec(
    body: ChatBody, model: ServedModel, reply: ChatReply, context: RequestContext
) -> GenerationSpec:
    """Render, encode and check. Raises InvalidRequest."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(
            "'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs"
        )
    prompt, token_ids, answer, grammar = await asyncio.to_thread(_prepare, body, model)
    predicted = await _predicted_token_ids(body, model)
    options = RequestOptions(
        request_id=reply.head.id,
        prompt_param="messages",
        max_tokens=body.token_limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        output=answer.output,
        markers=answer.markers,
        grammar=grammar,
        thinking_budget=answer.thinking_budget,
        strips_leading_space=model.tokenizer.strips_leading_space and not prompt.continues,
        cache_scope=context.cache_scope,
        timeout_s=context.timeout_s,
        highest_priority=context.highest_priority,
        arrival_s=context.arrival_s,
        predicted_token_ids=predicted,
    )
    return generation_spec(body, model, [token_ids], options)


async def _predicted_token_ids(body: ChatBody, model: ServedModel) -> tuple[int, ...]:
    if body.prediction is None:
        return ()
    encode = partial(model.tokenizer.encode_plain, body.prediction.text)
    return tuple(await asyncio.to_thread(encode))


def count_prompt_tokens(body: ChatBody, model: ServedModel) -> int:
    """Of the whole prompt, also if it does not fit. Slow: call it in a worker thread."""
    _, token_ids, _, _ = _prepare(body, model)
    return len(token_ids)


def _prepare(
    body: ChatBody, model: ServedModel
) -> tuple[RenderedPrompt, list[int], AnswerPlan, str]:
    """The prompt, its ids, how the answer is to be, and the text of its grammar."""
    constraint = read_constraint(body)
    plan = plan_prompt(body, model, constraint.told if constraint else None)
    prompt, token_ids = render_chat(body, model, plan)
    if plan.told_schema is not None and len(token_ids) >= model.context_limit:
        # The schema is enforced anyway, so it is no reason to refuse a conversation that fits.
        prompt, token_ids = render_chat(body, model, replace(plan, told_schema=None))
    inside = model.output_format.reasons and starts_inside(prompt.text, prompt.continued)
    if inside and plan.max_thinking_tokens == 0:
        token_ids += model.tokenizer.encode_parsed(CLOSING, add_bos=False)
        inside = False
    answer = plan_answer(
        plan,
        model,
        starts_inside=inside,
        continues=prompt.continues,
        is_structured=constraint is not None,
    )
    return prompt, token_ids, answer, answer_grammar(constraint, answer.tool_grammar, model)


def render_chat(
    body: ChatBody | TokenizeBody, model: ServedModel, plan: PromptPlan
) -> tuple[RenderedPrompt, list[int]]:
    """The prompt of a chat and its ids. Slow in the worst case: call it in a worker thread."""
    options = PromptOptions(
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_variables={**plan.template_variables, **body.chat_template_kwargs},
        tools=plan.tools.shown,
    )
    messages = read_messages(body.messages)
    if plan.told_schema is not None:
        messages = with_schema(messages, plan.told_schema)
    prompt = model.renderer.render(messages, options)
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
    choices = [_ChoiceFold(reply.in_old_form) for _ in range(reply.num_choices)]
    ids = TokenIdFields()
    head = reply.head.fields("chat.completion")
    usage: Usage | None = None
    async for batch in batches:
        for event in batch:
            match event:
                case PromptTokens(_, token_ids):
                    head["prompt_token_ids"] = list(token_ids)
                case TokenIds():
                    ids.take(event)
                case TextDelta(index, text, logprobs):
                    choices[index].message.texts.append(text)
                    choices[index].logprobs += chat_entries(reply.tokenizer, logprobs)
                case ReasoningDelta(index, text) if reply.includes_reasoning:
                    choices[index].message.thoughts.append(text)
                case ToolCallStart() | ToolCallArguments():
                    choices[event.index].message.add_call(event)
                case Finished(index, reason):
                    choices[index].finish_reason = finish_reason(
                        reason, in_old_form=reply.in_old_form
                    )
                case Usage():
                    usage = event
    assert usage is not None, "the events ended without a usage"
    return {
        **head,
        "choices": [
            choice.body(i, reply.wants_logprobs) | ids.fields(i) for i, choice in enumerate(choices)
        ],
        "usage": usage_object(usage),
    }


class _ChoiceFold:
    def __init__(self, in_old_form: bool) -> None:
        self.message = MessageFold(in_old_form=in_old_form)
        self.logprobs: list[dict[str, Any]] = []
        self.finish_reason = ""

    def body(self, index: int, wants_logprobs: bool) -> dict[str, Any]:
        return {
            "index": index,
            "message": self.message.body(),
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
        self._ids = TokenIdFields()
        self._call_delta = old_call_delta if reply.in_old_form else call_delta
        self._has_begun = False

    def write(self, batch: list[Event]) -> bytes:
        frames = [] if self._has_begun else self._roles(batch)
        self._has_begun = True
        for event in batch:
            match event:
                case TokenIds():
                    self._ids.take(event)
                case TextDelta(index, text, logprobs):
                    frames.append(self._delta(index, text, logprobs))
                case ReasoningDelta(index, text) if self._reply.includes_reasoning:
                    frames.append(self._choice(index, reasoning_delta(text), "null", "null"))
                case ToolCallStart() | ToolCallArguments():
                    frames.append(
                        self._choice(event.index, self._call_delta(event), "null", "null")
                    )
                case Finished(index, reason):
                    told = finish_reason(reason, in_old_form=self._reply.in_old_form)
                    frames.append(self._choice(index, "{}", "null", f'"{told}"'))
                case Usage() if self._reply.includes_usage:
                    usage = json_text(usage_object(event))
                    frames.append(frame(f"{self._usage_before}{usage}}}"))
        return b"".join(frames)

    def _roles(self, batch: list[Event]) -> list[bytes]:
        delta = '{"role":"assistant","content":"","refusal":null}'
        prompts = [event.token_ids for event in batch if isinstance(event, PromptTokens)]
        more = f',"prompt_token_ids":{json_text(prompts[0])}' if prompts else ""
        return [
            self._choice(i, delta, "null", "null", more) for i in range(self._reply.num_choices)
        ]

    def _delta(self, index: int, text: str, logprobs: tuple[Any, ...]) -> bytes:
        written = "null"
        if self._reply.wants_logprobs:
            entries = chat_entries(self._reply.tokenizer, logprobs)
            written = json_text(_logprobs_object(entries))
        return self._choice(index, f'{{"content":{json_text(text)}}}', written, "null")

    def _choice(
        self, index: int, delta: str, logprobs: str, finish_reason: str, more: str = ""
    ) -> bytes:
        """`more`: further fields of the chunk itself."""
        ids = self._ids.fields(index)
        token_ids = f',"token_ids":{json_text(ids["token_ids"])}' if ids else ""
        return frame(
            f'{self._before}{index},"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":{finish_reason}{token_ids}{self._after[:-1]}{more}}}'
        )


def _logprobs_object(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": entries, "refusal": None}
