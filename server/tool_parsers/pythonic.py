"""Llama 3.2 and 4, and others: the answer is a list of calls in Python's notation.

```
[get_weather(city="Oslo", days=2), get_time()]
```
Values are Python literals (`true`, `false` and `null` are taken too); a call's arguments are given
out when it is complete. Llama 4 may put `<|python_start|>` and `<|python_end|>` around the list.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from typing import Any

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
from server.tool_parsers.scanner import BracketScanner
from server.tools import Functions, FunctionTool

BEGIN = "<|python_start|>"
END = "<|python_end|>"

_NAME = re.compile(r"[A-Za-z_][\w-]*\s*")
_CONSTANTS = {"true": True, "false": False, "null": None}


def read_calls(buffer: TextBuffer, start: int, functions: Functions) -> Reading:
    if buffer.text.startswith(BEGIN, start):
        start = yield from buffer.skip_space(start + len(BEGIN))
        if (yield from buffer.expects(start, "[")) is None:
            raise MalformedCall
    yield from _read_call(buffer, start + 1, functions)
    while True:
        start = yield from buffer.skip_space(0)
        if (yield from buffer.expects(start, ",")) is None:
            break
        try:
            yield from _read_call(buffer, start + 1, functions)
        except MalformedCall:
            break
    yield from buffer.skip("]")
    yield from buffer.skip(END)


def _read_call(buffer: TextBuffer, start: int, functions: Functions) -> Reading:
    start = yield from buffer.skip_space(start)
    bracket = yield from _find_bracket(buffer, start)
    name = buffer.text[start:bracket].strip()
    if name not in functions:
        raise MalformedCall
    end = yield from _find_end(buffer, bracket)
    arguments = to_json(parse_arguments(buffer.text[bracket:end]))
    buffer.take(end)
    yield CallStart(name)
    yield CallArguments(arguments)


def parse_arguments(text: str) -> dict[str, Any]:
    """`(a=1, b="x")` → {"a": 1, "b": "x"}. Raises MalformedCall."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # An unknown escape in a string is no news here.
            call = ast.parse(f"f{text}", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise MalformedCall from error
    if not isinstance(call, ast.Call) or call.args:
        raise MalformedCall
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise MalformedCall
        arguments[keyword.arg] = _value(keyword.value)
    return arguments


def _value(node: ast.expr) -> Any:
    """The JSON value of a literal."""
    match node:
        case ast.Constant(value=None | str() | int() | float()):
            return node.value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise MalformedCall


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise MalformedCall


def _find_bracket(buffer: TextBuffer, start: int) -> Wait[int]:
    """The place of the `(` behind a name. Raises MalformedCall as soon as there is none."""
    while True:
        match = _NAME.match(buffer.text, start)
        end = start if match is None else match.end()
        if end < len(buffer.text):
            if match is None or buffer.text[end] != "(":
                raise MalformedCall
            return end
        if buffer.ended:
            raise MalformedCall
        yield None


def _find_end(buffer: TextBuffer, start: int) -> Wait[int]:
    scanner = BracketScanner(python=True)
    while (end := scanner.scan(buffer.text, start)) is None:
        start = len(buffer.text)
        if buffer.ended or scanner.too_deep:
            raise MalformedCall
        yield None
    if scanner.too_deep:
        raise MalformedCall
    return end


def _call(function: FunctionTool, literal: Literal) -> str:
    arguments = property_list(function, lambda name, value: f"{literal(name + '=')} {value}")
    return f"{literal(function.name + '(')} ({arguments}) {literal(')')}"


def _syntax(control_tokens: Mapping[str, int]) -> CallSyntax:
    return CallSyntax(call=_call, open="[", between=", ", close="]")


FAMILY = ToolFamily(
    name="pythonic",
    openings=(BEGIN,),
    bare="[",
    read_calls=read_calls,
    syntax=_syntax,
    markers=(BEGIN, END),
)
