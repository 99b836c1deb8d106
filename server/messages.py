"""Chat messages from the wire to the plain dictionaries that a chat template reads.

On the wire content may be null, a string or parts, and tool arguments are a JSON string; in a
template content is always a string and arguments are a mapping. Checked by hand and one by one,
so that 10,000 wrong messages cost one error. Knows nothing of templates or tokens.
"""

from __future__ import annotations

import json
from typing import Any

from server.errors import InvalidRequest
from server.json_body import check_depth, check_text
from server.limits import MAX_MESSAGES, MAX_TOOL_CALLS
from server.tools import check_function_name

Message = dict[str, Any]

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def read_messages(value: Any) -> list[Message]:
    """The template's form of `messages`. Raises InvalidRequest naming `messages[i]….`"""
    if not isinstance(value, list):
        raise InvalidRequest("'messages' must be a list of messages.", param="messages")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise InvalidRequest(
            f"'messages' must have 1 to {MAX_MESSAGES} entries; it has {len(value)}.",
            param="messages",
        )
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def _read_message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise InvalidRequest(f"'{where}' must be an object.", param=where)
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(
            f"'{where}.role' must be one of {', '.join(_ROLES)}.", param=f"{where}.role"
        )
    message: Message = {"role": _ROLES[role], "content": _read_content(value, role, where)}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if (text := value.get(key)) is not None:
            message[key] = _string(text, f"{where}.{key}")
    if role == "assistant" and (thought := value.get("reasoning")) is not None:
        message.setdefault("reasoning_content", _string(thought, f"{where}.reasoning"))
    if role == "tool" and "tool_call_id" not in message:
        raise InvalidRequest(f"'{where}.tool_call_id' is required.", param=f"{where}.tool_call_id")
    if role == "assistant" and (calls := _read_tool_calls(value, where)):
        message["tool_calls"] = calls
    return message


def _read_content(message: dict[str, Any], role: str, where: str) -> str:
    """Null and absent content are the empty text, which only an assistant may have sent."""
    content = message.get("content")
    path = f"{where}.content"
    if content is None:
        if role in ("assistant", "function"):
            return ""
        raise InvalidRequest(f"'{path}' is required for the role '{role}'.", param=path)
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [_read_part(part, f"{path}[{i}]") for i, part in enumerate(content)]
        return "\n".join(parts)
    raise InvalidRequest(f"'{path}' must be a string or a list of parts.", param=path)


def _read_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f"'{where}' must be an object with a 'type'.", param=where)
    if kind == "text":
        return _string(part.get("text"), f"{where}.text")
    if kind == "refusal":
        return _string(part.get("refusal"), f"{where}.refusal")
    raise InvalidRequest(
        f"'{where}' is of type '{kind[:40]}', but this server takes text parts only.", param=where
    )


def _read_tool_calls(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    if calls is None and isinstance(message.get("function_call"), dict):
        calls = [{"type": "function", "function": message["function_call"]}]
    if calls is None:
        return []
    path = f"{where}.tool_calls"
    if not isinstance(calls, list) or len(calls) > MAX_TOOL_CALLS:
        raise InvalidRequest(
            f"'{path}' must be a list of at most {MAX_TOOL_CALLS} calls.", param=path
        )
    return [_read_tool_call(call, f"{path}[{i}]") for i, call in enumerate(calls)]


def _read_tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequest(f"'{where}.function' must be an object.", param=f"{where}.function")
    path = f"{where}.function"
    read: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": check_function_name(function.get("name"), f"{path}.name"),
            "arguments": _read_arguments(function.get("arguments"), f"{path}.arguments"),
        },
    }
    if call.get("id") is not None:
        read["id"] = _string(call["id"], f"{where}.id")
    return read


def _read_arguments(arguments: Any, where: str) -> Any:
    """A mapping. Text that is not a JSON object (a call that was cut short) stays text."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, dict):
        return arguments
    text = _string(arguments, where)
    check_depth(text, where)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    check_text(value, where)
    return value if isinstance(value, dict) else text


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"'{where}' must be a string.", param=where)
    return value
