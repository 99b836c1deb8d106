"""Mistral: `[TOOL_CALLS]`, then a JSON array of calls; newer models a name and its arguments.

```
[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": …}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]…
```
Both are read. A model with the control token `[ARGS]` is made to write the second form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b

from server.tool_parsers.buffer import TextBuffer, Wait
from server.tool_parsers.family import (
    CallStart,
    CallSyntax,
    Literal,
    MalformedCall,
    Reading,
    ToolFamily,
)
from server.tool_parsers.json_calls import read_json_call, read_object
from server.tool_parsers.lark import arguments_schema, json_call
from server.tools import Functions, FunctionTool

BEGIN = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"

_NAME = re.compile(r"[a-zA-Z0-9_-]*")
_TEMPLATE_ID = re.compile(r"[a-zA-Z0-9]{9}")


def read_calls(buffer: TextBuffer, start: int, functions: Functions) -> Reading:
    start = yield from buffer.skip_space(start + len(BEGIN))
    if (yield from buffer.expects(start, "[")) is not None:
        yield from _read_array(buffer, start + 1, functions)
    elif (yield from buffer.expects(start, "{")) is not None:
        yield from read_json_call(buffer, start, functions)
    else:
        yield from _read_named(buffer, start, functions)


def _read_array(buffer: TextBuffer, start: int, functions: Functions) -> Reading:
    yield from read_json_call(buffer, start, functions)
    while True:
        start = yield from buffer.skip_space(0)
        if (yield from buffer.expects(start, ",")) is None:
            break
        try:
            yield from read_json_call(buffer, start + 1, functions)
        except MalformedCall:
            break
    yield from buffer.skip("]")


def _read_named(buffer: TextBuffer, start: int, functions: Functions) -> Reading:
    end = yield from _find_name_end(buffer, start)
    name = buffer.text[start:end]
    if name not in functions:
        raise MalformedCall
    if (yield from buffer.expects(end, CALL_ID)) is not None:
        end = yield from buffer.find(ARGS, end)
    if (yield from buffer.expects(end, ARGS)) is not None:
        end += len(ARGS)
    end = yield from buffer.skip_space(end)
    if (yield from buffer.expects(end, "{")) is None:
        raise MalformedCall
    buffer.take(end)
    yield CallStart(name)
    yield from read_object(buffer)


def _find_name_end(buffer: TextBuffer, start: int) -> Wait[int]:
    while True:
        match = _NAME.match(buffer.text, start)
        assert match is not None, "the pattern matches the empty text"
        if match.end() < len(buffer.text) or buffer.ended:
            return match.end()
        yield None


def _listed_call(function: FunctionTool, literal: Literal) -> str:
    return json_call(function, literal, "arguments")


def _named_call(function: FunctionTool, literal: Literal) -> str:
    return f"{literal(function.name + ARGS)} %json {arguments_schema(function)}"


def _syntax(control_tokens: Mapping[str, int]) -> CallSyntax:
    if ARGS in control_tokens:
        return CallSyntax(call=_named_call, trigger=BEGIN, repeats_trigger=True)
    return CallSyntax(call=_listed_call, trigger=BEGIN, open="[", between=", ", close="]")


def template_call_id(call_id: str) -> str:
    """Mistral's templates raise unless an id has nine letters and digits: others are hashed."""
    if _TEMPLATE_ID.fullmatch(call_id):
        return call_id
    return blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]


FAMILY = ToolFamily(
    name="mistral",
    openings=(BEGIN,),
    read_calls=read_calls,
    syntax=_syntax,
    markers=(BEGIN, CALL_ID, ARGS),
    template_call_id=template_call_id,
)
