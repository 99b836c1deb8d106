"""Tools in the prompt: for templates that know them and for those that do not.

A template that has the variable `tools` gets the definitions, and messages with `tool_calls` and
the role `tool`. For any other one this module writes the same as text, in the generic format
(`tool_parsers/hermes.py`):

- the system message ends with the definitions and how to call (it is made if there is none);
- an assistant's calls stand in `<tool_call>` tags behind its text;
- results are a user's turn, each in `<tool_response>` tags.

In both cases the results of a turn follow the order of its calls, by id, since many templates name
neither; a result whose id fits no call stays behind them, in its place. Knows nothing of jinja.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from server.messages import Message

_INTRODUCTION = """\
You can call functions. These are the functions, as JSON:
<tools>
{tools}
</tools>
To call a function, answer with nothing but its name and arguments, like this:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def ordered_results(messages: Sequence[Message]) -> list[Message]:
    """Tool results in the order of the calls they answer, with the function's name."""
    ordered: list[Message] = []
    calls: dict[str, tuple[int, str]] = {}
    results: list[Message] = []
    for message in [*messages, {"role": ""}]:
        if message["role"] == "tool":
            results.append(message)
            continue
        ordered += _sorted_results(results, calls)
        results = []
        if message["role"]:
            ordered.append(message)
        if message["role"] == "assistant":
            calls = _calls_by_id(message)
    return ordered


def with_template_ids(messages: Sequence[Message], convert: Callable[[str], str]) -> list[Message]:
    """The ids of calls and results as the template wants them."""
    converted: list[Message] = []
    for message in messages:
        if "tool_call_id" in message:
            message = message | {"tool_call_id": convert(message["tool_call_id"])}
        if "tool_calls" in message:
            calls = [
                call | {"id": convert(call["id"])} if "id" in call else call
                for call in message["tool_calls"]
            ]
            message = message | {"tool_calls": calls}
        converted.append(message)
    return converted


def as_text(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """The conversation for a template that knows neither tools nor their results."""
    plain: list[Message] = []
    is_in_results = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result and is_in_results:
            plain[-1] = plain[-1] | {"content": f"{plain[-1]['content']}\n{_result(message)}"}
        elif is_result:
            plain.append({"role": "user", "content": _result(message)})
        else:
            plain.append(_with_calls_as_text(message))
        is_in_results = is_result
    return _with_introduction(plain, tools) if tools else plain


def _sorted_results(results: list[Message], calls: dict[str, tuple[int, str]]) -> list[Message]:
    def place(result: Message) -> int:
        call = calls.get(result.get("tool_call_id", ""))
        return len(calls) if call is None else call[0]

    named = [
        {"name": calls[result["tool_call_id"]][1]} | result
        if result.get("tool_call_id") in calls
        else result
        for result in results
    ]
    return sorted(named, key=place)


def _calls_by_id(message: Message) -> dict[str, tuple[int, str]]:
    calls = message.get("tool_calls", [])
    return {c["id"]: (i, c["function"]["name"]) for i, c in enumerate(calls) if "id" in c}


def _with_calls_as_text(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    written = [_call(call["function"]) for call in message["tool_calls"]]
    content = "\n".join(filter(None, [message["content"], "".join(written)]))
    return {"role": message["role"], "content": content}


def _call(function: dict[str, Any]) -> str:
    return f"<tool_call>\n{_dump(function)}\n</tool_call>"


def _result(message: Message) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _with_introduction(messages: list[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    text = _INTRODUCTION.format(tools="\n".join(_dump(tool["function"]) for tool in tools))
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    first = messages[0]
    return [first | {"content": f"{first['content']}\n\n{text}"}, *messages[1:]]


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
