"""Items of all kinds in one answer, made from the event union, against the package's models."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from server.adapters.responses import ResponseReply, collect_response, stream_chunks
from server.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from server.responses_protocol import ResponseBody
from tests.server.byte_tokenizer import byte_tokenizer
from tests.server.response_client import checked_events, checked_response, parse_frames

CALLS: list[Event] = [
    ReasoningDelta(0, "I must "),
    ReasoningDelta(0, "add."),
    TextDelta(0, "Adding."),
    ToolCallStart(0, 0, "call_a", "add"),
    ToolCallArguments(0, 0, '{"a":'),
    ToolCallArguments(0, 0, "1}"),
    ToolCallStart(0, 1, "call_b", "now"),
    ToolCallArguments(0, 1, "{}"),
]
USAGE = Usage(5, 9, 0, reasoning_tokens=3)


def reply_of(kept: list[dict[str, Any]]) -> ResponseReply:
    return ResponseReply("resp_1", 1, "m", ResponseBody(), byte_tokenizer(), "default", kept.append)


async def batches_of(events: list[Event], size: int) -> AsyncIterator[list[Event]]:
    for i in range(0, len(events), size):
        yield events[i : i + size]


def collected(events: list[Event]) -> dict[str, Any]:
    return checked_response(asyncio.run(collect_response(batches_of(events, 100), reply_of([]))))


def streamed(events: list[Event], size: int = 1) -> list[dict[str, Any]]:
    async def run() -> bytes:
        pieces = stream_chunks(batches_of(events, size), reply_of([]))
        return b"".join([piece async for piece in pieces])

    return checked_events(parse_frames(asyncio.run(run()).decode()))


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    response = collected([*CALLS, Finished(0, "tool_calls"), USAGE])
    assert response["status"] == "completed"
    reasoning, message, first, second = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I must add."}]
    assert message["content"][0]["text"] == "Adding."
    assert (first["call_id"], first["name"], first["arguments"]) == ("call_a", "add", '{"a":1}')
    assert (second["call_id"], second["arguments"]) == ("call_b", "{}")
    assert {item["status"] for item in response["output"]} == {"completed"}
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


def test_every_item_is_added_filled_and_done_before_the_next() -> None:
    events = streamed([*CALLS, Finished(0, "tool_calls"), USAGE])
    kinds = [event["type"].removeprefix("response.") for event in events]
    part = ["output_item.added", "content_part.added"]
    part_done = ["content_part.done", "output_item.done"]
    call = ["output_item.added"], ["function_call_arguments.done", "output_item.done"]
    assert kinds == [
        "created", "in_progress",
        *part, "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *part_done,
        *part, "output_text.delta", "output_text.done", *part_done,
        *call[0], *["function_call_arguments.delta"] * 2, *call[1],
        *call[0], "function_call_arguments.delta", *call[1],
        "completed",
    ]  # fmt: skip
    indices = [event["output_index"] for event in events if "output_index" in event]
    assert indices == sorted(indices)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


def test_a_call_that_was_cut_is_incomplete() -> None:
    response = collected([*CALLS[3:5], Finished(0, "length"), USAGE])
    assert response["status"] == "incomplete"
    call = response["output"][0]
    assert (call["arguments"], call["status"]) == ('{"a":', "incomplete")


def test_batches_of_any_size_make_the_same_events() -> None:
    events = [*CALLS, Finished(0, "tool_calls"), USAGE]
    one, all_ = streamed(events, 1), streamed(events, 100)
    assert [e["type"] for e in one] == [e["type"] for e in all_]
    assert one[-1]["response"]["usage"] == all_[-1]["response"]["usage"]
