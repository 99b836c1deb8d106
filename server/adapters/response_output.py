"""The output items of a response as they grow, and the stream events that tell of it.

One item is open at a time: text opens a message, reasoning a reasoning item, a tool call a
function_call; whatever comes next closes the one before. Each method returns the event objects
that its change makes, without `sequence_number`. Streams send them, whole answers drop them, so
both say the same. Knows the Responses API's objects; not where text comes from or who reads.
"""

from __future__ import annotations

from typing import Any

from server.response_items import Item, new_id

Events = list[dict[str, Any]]


class ResponseOutput:
    """`items` is the `output` of the response at any time."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._is_open = False

    def add_text(self, text: str, logprobs: list[dict[str, Any]]) -> Events:
        """`logprobs` are the entries of the tokens that made `text`, as chat has them."""
        events = self._open_message()
        self._pieces.append(text)
        self._logprobs += logprobs
        delta = {**self._part_place(), "delta": text, "logprobs": logprobs}
        return [*events, {"type": "response.output_text.delta", **delta}]

    def add_reasoning(self, text: str) -> Events:
        events = self._open_reasoning()
        self._pieces.append(text)
        delta = {**self._part_place(), "delta": text}
        return [*events, {"type": "response.reasoning_text.delta", **delta}]

    def start_call(self, call_id: str, name: str) -> Events:
        events = self.close()
        call = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
        return events + self._open(call, "fc")

    def add_arguments(self, text: str) -> Events:
        """Of the call that was started last."""
        self._pieces.append(text)
        return [{"type": "response.function_call_arguments.delta", **self._place(), "delta": text}]

    def ensure_message(self) -> Events:
        """An answer without a token still has a message, with an empty text."""
        return [] if self.items else self._open_message()

    def close(self, status: str = "completed") -> Events:
        """End the open item, if there is one."""
        if not self._is_open:
            return []
        item = self.items[-1]
        closers = {"message": self._close_message, "reasoning": self._close_reasoning}
        events = closers.get(item["type"], self._close_call)(item)
        item["status"] = status
        self._is_open = False
        return [*events, {"type": "response.output_item.done", **self._index(), "item": item}]

    def _open(self, item: Item, prefix: str) -> Events:
        self._pieces, self._logprobs, self._is_open = [], [], True
        item = {"id": new_id(prefix), "status": "in_progress", **item}
        self.items.append(item)
        # The item goes on growing while the event is being written: it gets a copy.
        return [{"type": "response.output_item.added", **self._index(), "item": dict(item)}]

    def _open_message(self) -> Events:
        if self._is_open and self.items[-1]["type"] == "message":
            return []
        events = self.close()
        events += self._open({"type": "message", "role": "assistant", "content": []}, "msg")
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            *events,
            {"type": "response.content_part.added", **self._part_place(), "part": part},
        ]

    def _open_reasoning(self) -> Events:
        if self._is_open and self.items[-1]["type"] == "reasoning":
            return []
        events = self.close()
        events += self._open({"type": "reasoning", "summary": [], "content": []}, "rs")
        part = {"type": "reasoning_text", "text": ""}
        return [
            *events,
            {"type": "response.content_part.added", **self._part_place(), "part": part},
        ]

    def _close_message(self, item: Item) -> Events:
        text, place = "".join(self._pieces), self._part_place()
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
        item["content"] = [part]
        done = {**place, "text": text, "logprobs": self._logprobs}
        return [
            {"type": "response.output_text.done", **done},
            {"type": "response.content_part.done", **place, "part": part},
        ]

    def _close_reasoning(self, item: Item) -> Events:
        text, place = "".join(self._pieces), self._part_place()
        part = {"type": "reasoning_text", "text": text}
        item["content"] = [part]
        return [
            {"type": "response.reasoning_text.done", **place, "text": text},
            {"type": "response.content_part.done", **place, "part": part},
        ]

    def _close_call(self, item: Item) -> Events:
        item["arguments"] = "".join(self._pieces)
        done = {**self._place(), "name": item["name"], "arguments": item["arguments"]}
        return [{"type": "response.function_call_arguments.done", **done}]

    def _index(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], **self._index()}

    def _part_place(self) -> dict[str, Any]:
        return {**self._place(), "content_index": 0}
