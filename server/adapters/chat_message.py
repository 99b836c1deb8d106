"""Thoughts and tool calls in chat's shape: in a whole message and in the deltas of a stream.

A thought is written twice, as `reasoning_content` and as `reasoning`: clients know the one or the
other. The first delta of a call has its place, id, type, name and empty arguments, later ones only
more of the arguments. A message with calls and no text has the content null. In the old form,
`function_call`, there is one call, without an id.
"""

from __future__ import annotations

from typing import Any

from server.adapters.reply import json_text
from server.events import ToolCallArguments, ToolCallStart


class MessageFold:
    """Collects the parts of one choice's message."""

    def __init__(self, *, in_old_form: bool = False) -> None:
        self._in_old_form = in_old_form
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
        calls = [
            (start.id, {"name": start.name, "arguments": "".join(pieces)})
            for start, pieces in self._calls
        ]
        if calls and self._in_old_form:
            message["function_call"] = calls[0][1]
        elif calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": function}
                for call_id, function in calls
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


def old_call_delta(event: ToolCallStart | ToolCallArguments) -> str:
    if isinstance(event, ToolCallArguments):
        return f'{{"function_call":{{"arguments":{json_text(event.text)}}}}}'
    return f'{{"function_call":{{"name":{json_text(event.name)},"arguments":""}}}}'


def finish_reason(reason: str, *, in_old_form: bool) -> str:
    return "function_call" if in_old_form and reason == "tool_calls" else reason
