"""Thoughts and tool calls in chat's shape: in a whole message and in the deltas of a stream.

A thought is written twice, as `reasoning_content` and as `reasoning`: clients know the one or the
other. The first delta of a call has its place, id, type, name and empty arguments, later ones only
more of the arguments. A message with calls and no text has the content null.
"""

from __future__ import annotations

from typing import Any

from server.adapters.reply import json_text
from server.events import ToolCallArguments, ToolCallStart


class MessageFold:
    """Collects the parts of one choice's message."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self._calls: list[tuple[ToolCallStart, list[str]]] = []

    def add_call(self, event: ToolCallStart | ToolCallArguments) -> None:
        if isinstance(event, ToolCallStart):
            self._calls.append((event, []))
        else:
            self._calls[event.call][1].append(event.text)

    def body(self) -> dict[str, Any]:
        content = "".join(self.texts)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not content else content,
            "refusal": None,
        }
        if self.thoughts:
            thought = "".join(self.thoughts)
            message |= {"reasoning_content": thought, "reasoning": thought}
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": start.id,
                    "type": "function",
                    "function": {"name": start.name, "arguments": "".join(pieces)},
                }
                for start, pieces in self._calls
            ]
        return message


def reasoning_delta(text: str) -> str:
    written = json_text(text)
    return f'{{"reasoning_content":{written},"reasoning":{written}}}'


def call_delta(event: ToolCallStart | ToolCallArguments) -> str:
    if isinstance(event, ToolCallArguments):
        call = f'{{"index":{event.call},"function":{{"arguments":{json_text(event.text)}}}}}'
    else:
        call = (
            f'{{"index":{event.call},"id":{json_text(event.id)},"type":"function",'
            f'"function":{{"name":{json_text(event.name)},"arguments":""}}}}'
        )
    return f'{{"tool_calls":[{call}]}}'
