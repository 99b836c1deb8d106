"""Items of the Responses API: from the wire to one checked form, and on to chat messages.

The checked form is what `GET /v1/responses/{id}/input_items` lists and what is kept for
`previous_response_id`: every item has an id, a type and a status, and content is a list of parts.
A reasoning item with readable text goes to the chat template as the next assistant message's
`reasoning_content`; one without (a summary, encrypted content) says nothing to the model and is
kept only for the list. Consecutive items of the assistant are one chat message.

Knows nothing of HTTP, storage (`find_item` is handed in) or templates.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server.errors import InvalidRequest
from server.limits import MAX_IDENTIFIER_CHARS, MAX_MESSAGES

Item = dict[str, Any]
FindItem = Callable[[str], Item | None]

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def read_items(value: Any, earlier: Sequence[Item], find_item: FindItem) -> list[Item]:
    """The checked form of `input`; `earlier` are the items that come before it.

    Raises:
        InvalidRequest: names `input[i]…`.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise _wrong("input", "must be a string or a list of items")
    if len(earlier) + len(value) > MAX_MESSAGES:
        raise _wrong("input", f"must have at most {MAX_MESSAGES} items with all that precede it")
    items = [_read_item(item, f"input[{i}]", find_item) for i, item in enumerate(value)]
    if not earlier and not any(item["type"] == "message" for item in items):
        raise _wrong("input", "must hold a message")
    _check_outputs(earlier, items)
    return items


def chat_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """`items` as the messages of a chat request, after `instructions` as a system message."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    turn = _AssistantTurn()
    for item in items:
        if _is_of_assistant(item):
            turn.add(item)
            continue
        messages += turn.take()
        messages.append(_chat_message(item))
    return messages + turn.take()


class _AssistantTurn:
    """Consecutive items of the assistant, collected into one message; a second text opens
    another one."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._text: list[dict[str, Any]] | None = None
        self._calls: list[dict[str, Any]] = []
        self._done: list[dict[str, Any]] = []

    def add(self, item: Item) -> None:
        if item["type"] == "reasoning":
            if self._text is not None or self._calls:
                self._close()
            self._reasoning += [part["text"] for part in item.get("content") or []]
        elif item["type"] == "function_call":
            self._calls.append(_chat_call(item))
        else:
            if self._text is not None or self._calls:
                self._close()
            self._text = _chat_parts(item)

    def take(self) -> list[dict[str, Any]]:
        """The finished messages; the turn is empty afterwards."""
        if self._text is not None or self._calls:
            self._close()
        self._reasoning = []
        done, self._done = self._done, []
        return done

    def _close(self) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": self._text}
        if self._calls:
            message["tool_calls"] = self._calls
        if self._reasoning:
            message["reasoning_content"] = "\n".join(self._reasoning)
        self._done.append(message)
        self._reasoning, self._text, self._calls = [], None, []


def _is_of_assistant(item: Item) -> bool:
    if item["type"] == "message":
        return bool(item["role"] == "assistant")
    return item["type"] in ("function_call", "reasoning")


def _chat_message(item: Item) -> dict[str, Any]:
    if item["type"] == "message":
        return {"role": item["role"], "content": _chat_parts(item)}
    output = item["output"]
    if isinstance(output, list):
        output = [{"type": "text", "text": part["text"]} for part in output]
    return {"role": "tool", "tool_call_id": item["call_id"], "content": output}


def _chat_parts(item: Item) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part.get("text", part.get("refusal", ""))}
        for part in item["content"]
    ]


def _chat_call(item: Item) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _read_item(value: Any, where: str, find_item: FindItem) -> Item:
    if not isinstance(value, dict):
        raise _wrong(where, "must be an object")
    kind = value.get("type")
    if kind is None:
        # OpenAI lets the type of a message out, and that of a reference.
        kind = "item_reference" if "id" in value and "role" not in value else "message"
    readers: Mapping[str, Callable[[Item, str], Item]] = {
        "message": _read_message,
        "function_call": _read_call,
        "function_call_output": _read_call_output,
        "reasoning": _read_reasoning,
    }
    if kind == "item_reference":
        return _resolve(value, where, find_item)
    if not isinstance(kind, str) or kind not in readers:
        shown = kind[:80] if isinstance(kind, str) else "not a string"
        raise _wrong(
            f"{where}.type",
            f"is '{shown}', which is not served; items are {', '.join(readers)} and item_reference",
        )
    return {"id": _id(value, where, kind), "type": kind, **readers[kind](value, where)}


def _resolve(value: Item, where: str, find_item: FindItem) -> Item:
    item_id = _string(value.get("id"), f"{where}.id")
    found = find_item(item_id)
    if found is None:
        raise InvalidRequest(f"Item with id '{item_id[:80]}' not found.", param=f"{where}.id")
    return found


def _read_message(value: Item, where: str) -> Item:
    role = value.get("role")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    content = value.get("content")
    kind = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        parts = [_part(kind, content)]
    elif isinstance(content, list):
        parts = [_read_part(p, kind, f"{where}.content[{i}]") for i, p in enumerate(content)]
    else:
        raise _wrong(f"{where}.content", "must be a string or a list of parts")
    return {"role": role, "status": "completed", "content": parts}


def _read_part(value: Any, kind: str, where: str) -> Item:
    given = value.get("type") if isinstance(value, dict) else None
    if not isinstance(given, str):
        raise _wrong(where, "must be an object with a 'type'")
    if given not in _TEXT_PARTS:
        raise _wrong(f"{where}.type", f"is '{given[:80]}', but this server takes text parts only")
    if given == "refusal":
        text = _string(value.get("refusal"), f"{where}.refusal")
        return {"type": "refusal", "refusal": text} if kind == "output_text" else _part(kind, text)
    return _part(kind, _string(value.get("text"), f"{where}.text"))


def _part(kind: str, text: str) -> Item:
    if kind == "output_text":
        return {"type": kind, "text": text, "annotations": [], "logprobs": []}
    return {"type": kind, "text": text}


def _read_call(value: Item, where: str) -> Item:
    return {
        "status": "completed",
        "call_id": _string(value.get("call_id"), f"{where}.call_id", MAX_IDENTIFIER_CHARS),
        "name": _string(value.get("name"), f"{where}.name", MAX_IDENTIFIER_CHARS),
        "arguments": _string(value.get("arguments"), f"{where}.arguments"),
    }


def _read_call_output(value: Item, where: str) -> Item:
    output = value.get("output")
    if isinstance(output, list):
        output = [
            _read_part(part, "input_text", f"{where}.output[{i}]") for i, part in enumerate(output)
        ]
    else:
        output = _string(output, f"{where}.output")
    call_id = _string(value.get("call_id"), f"{where}.call_id", MAX_IDENTIFIER_CHARS)
    return {"status": "completed", "call_id": call_id, "output": output}


def _read_reasoning(value: Item, where: str) -> Item:
    item: Item = {"status": "completed"}
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        parts = value.get(name) or []
        if not isinstance(parts, list):
            raise _wrong(f"{where}.{name}", "must be a list of parts")
        item[name] = [
            {"type": kind, "text": _part_text(part, f"{where}.{name}[{i}]")}
            for i, part in enumerate(parts)
        ]
    return item


def _part_text(part: Any, where: str) -> str:
    return _string(part.get("text") if isinstance(part, dict) else None, f"{where}.text")


def _check_outputs(earlier: Sequence[Item], items: Sequence[Item]) -> None:
    """Every output belongs to a call that stands before it, as at OpenAI."""
    calls = {item["call_id"] for item in earlier if item["type"] == "function_call"}
    for i, item in enumerate(items):
        if item["type"] == "function_call":
            calls.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in calls:
            raise InvalidRequest(
                f"No tool call found for function call output with call_id {item['call_id'][:80]}.",
                param=f"input[{i}].call_id",
            )


def _id(value: Item, where: str, kind: str) -> str:
    if value.get("id") is None:
        return new_id(_ID_PREFIXES[kind])
    return _string(value["id"], f"{where}.id", MAX_IDENTIFIER_CHARS)


def _string(value: Any, where: str, max_chars: int | None = None) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "must be a string")
    if max_chars is not None and len(value) > max_chars:
        raise _wrong(where, f"must have at most {max_chars} characters")
    return value


def _wrong(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"'{where}' {what}.", param=where)
