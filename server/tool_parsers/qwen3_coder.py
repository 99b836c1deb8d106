"""Qwen3-Coder: tags for the function and for every parameter, values as plain text.

```
<tool_call>
<function=get_weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
```
A value is the text between its tags without the line breaks next to them. Where the schema says
string it is taken as it is; else it is JSON if it can be read so, and a string if not. A closing
tag inside a value ends it only if another parameter or the function's end follows. Arguments are
given out parameter by parameter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from server.errors import InvalidRequest
from server.tool_parsers.buffer import TextBuffer, Wait
from server.tool_parsers.family import (
    CallArguments,
    CallStart,
    CallSyntax,
    Literal,
    MalformedCall,
    Reading,
    ToolFamily,
)
from server.tool_parsers.json_calls import to_json
from server.tool_parsers.lark import property_list
from server.tools import Functions, FunctionTool

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

_PYTHON = {"True": True, "False": False, "None": None}
_STRING_CONSTRAINTS = ("pattern", "format", "minLength", "maxLength", "const")


def read_calls(buffer: TextBuffer, start: int, functions: Functions) -> Reading:
    if buffer.text.startswith(BEGIN, start):
        start = yield from buffer.skip_space(start + len(BEGIN))
    if (yield from buffer.expects(start, FUNCTION)) is None:
        raise MalformedCall
    start += len(FUNCTION)
    end = yield from buffer.find(">", start)
    name = buffer.text[start:end].strip()
    if end < 0 or name not in functions:
        raise MalformedCall
    buffer.take(end + 1)
    yield CallStart(name)
    yield from _read_parameters(buffer, functions[name])


def _read_parameters(buffer: TextBuffer, function: FunctionTool) -> Reading:
    written = "{"
    while True:
        start = yield from buffer.skip_space(0)
        tag = yield from buffer.expects(start, PARAMETER, FUNCTION_END)
        if tag != PARAMETER:
            break
        name_end = yield from buffer.find(">", start)
        value_end = yield from _find_value_end(buffer, name_end + 1)
        if name_end < 0 or value_end < 0:
            break
        name = buffer.text[start + len(PARAMETER) : name_end].strip()
        value = parse_value(buffer.text[name_end + 1 : value_end], function, name)
        buffer.take(value_end + len(PARAMETER_END))
        yield CallArguments(f"{written}{to_json(name)}: {to_json(value)}")
        written = ", "
    if tag != FUNCTION_END and buffer.ended:
        buffer.take(len(buffer.text))  # Cut short, and so are the arguments.
        return
    yield CallArguments("{}" if written == "{" else "}")
    yield from buffer.skip(FUNCTION_END)
    yield from buffer.skip(END)


def parse_value(text: str, function: FunctionTool, name: str) -> Any:
    """The JSON value that the text between the tags of a parameter stands for."""
    text = text.removeprefix("\n").removesuffix("\n")
    properties = function.parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    if _is_text(schema):
        return text
    if text in _PYTHON:
        return _PYTHON[text]
    try:
        value = json.loads(text, parse_constant=str)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value


def _is_text(schema: Any) -> bool:
    """Whether a schema allows strings only."""
    if not isinstance(schema, dict):
        return False
    values = schema.get("enum")
    if isinstance(values, list) and "type" not in schema:
        return all(isinstance(value, str) for value in values)
    return schema.get("type") == "string"


def _find_value_end(buffer: TextBuffer, start: int) -> Wait[int]:
    while True:
        end = yield from buffer.find(PARAMETER_END, start)
        if end < 0:
            return -1
        following = yield from buffer.skip_space(end + len(PARAMETER_END))
        tag = yield from buffer.expects(following, PARAMETER, FUNCTION_END)
        rest = buffer.text[following:]
        is_cut = buffer.ended and any(text.startswith(rest) for text in (PARAMETER, FUNCTION_END))
        if tag is not None or is_cut:
            return end
        start = end + 1


def _call(function: FunctionTool, literal: Literal) -> str:
    def write(name: str, value: str) -> str:
        schema = function.parameters["properties"][name]
        head, end = literal(f"\n{PARAMETER}{name}>\n"), literal(f"\n{PARAMETER_END}")
        if not _is_text(schema):
            return f"{head} {value} {end}"
        if "enum" in schema:
            choices = " | ".join(literal(value) for value in schema["enum"])
            return f"{head} ({choices}) {end}"
        for keyword in _STRING_CONSTRAINTS:
            if keyword in schema:
                where = f"{function.where}.parameters.properties.{name}"
                raise InvalidRequest(
                    f"'{where}.{keyword}' cannot be enforced in the way this model writes its "
                    "calls. Leave it out, or use tool_choice 'auto' and strict false.",
                    param=where,
                )
        return f"{head} parameter_text"

    parameters = property_list(function, write, between="")
    return f"{literal(function.name + '>')} {parameters} {literal(f'{chr(10)}{FUNCTION_END}')}"


def _syntax(control_tokens: Mapping[str, int]) -> CallSyntax:
    return CallSyntax(
        call=_call,
        trigger=BEGIN,
        open=f"\n{FUNCTION}",
        between="\n",
        close=f"\n{END}",
        repeats_trigger=True,
        rules=rf'parameter_text[suffix="\n{PARAMETER_END}"]: /(.|\n)*/',
    )


FAMILY = ToolFamily(
    name="qwen3_coder",
    openings=(BEGIN, FUNCTION),
    read_calls=read_calls,
    syntax=_syntax,
    markers=(BEGIN, END),
)
