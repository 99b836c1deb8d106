"""Calls written as a JSON object, `{"name": …, "arguments": {…}}`: shared by several families.

If the name comes first and the arguments are an object, they are passed on as they arrive, to the
character as the model wrote them. In any other order or form the object is read when it is
complete: arguments may then also be called `parameters`, be missing or null (`{}`), be a JSON text
in a string, or all of it may stand inside a member `function`.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from server.tool_parsers.buffer import TextBuffer, Wait
from server.tool_parsers.family import CallArguments, CallStart, MalformedCall, Reading
from server.tool_parsers.scanner import BracketScanner
from server.tools import Functions

_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    rf'"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
_FIRST_KEY = re.compile(rf"\{{\s*({_STRING})")
_KEYS = ("name", "type", "id", "function", "arguments", "parameters")


def read_json_call(buffer: TextBuffer, start: int, functions: Functions) -> Reading:
    """The call whose object begins at `start`, after space; takes all up to its end."""
    start = yield from buffer.skip_space(start)
    head = yield from _find_head(buffer, start)
    if head is not None:
        name = _loads(head[1])
        if name not in functions:
            raise MalformedCall
        buffer.take(head.end())
        yield CallStart(name)
        yield from read_object(buffer)
        yield from _skip_rest(buffer)
        return
    end = BracketScanner().scan(buffer.text, start)
    assert end is not None, "an object without such a head is complete"
    name, arguments = parse_call(buffer.text[start:end])
    if name not in functions:
        raise MalformedCall
    buffer.take(end)
    yield CallStart(name)
    yield CallArguments(arguments)


def read_object(buffer: TextBuffer) -> Reading:
    """The object at the front of the buffer as arguments, piece by piece."""
    scanner = BracketScanner()
    while (end := scanner.scan(buffer.text)) is None:
        if buffer.text:
            yield CallArguments(buffer.take(len(buffer.text)))
        if buffer.ended:
            return
        yield None
    yield CallArguments(buffer.take(end))


def parse_call(text: str) -> tuple[str, str]:
    """Name and arguments (JSON text) of a complete object. Raises MalformedCall."""
    call = _loads(text)
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise MalformedCall
    arguments = call.get("arguments", call.get("parameters"))
    if arguments is None:
        return call["name"], "{}"
    if isinstance(arguments, str):
        if not isinstance(_loads(arguments), dict):
            raise MalformedCall
        return call["name"], arguments
    if not isinstance(arguments, dict):
        raise MalformedCall
    return call["name"], to_json(arguments)


def to_json(value: Any) -> str:
    """JSON text that can be sent: half of a surrogate pair stays an escape.

    Raises MalformedCall for a number that JSON cannot hold.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    except ValueError as error:
        raise MalformedCall from error
    return text


def _find_head(buffer: TextBuffer, start: int) -> Wait[re.Match[str] | None]:
    """The match of `{"name": …, "arguments": `, or None once the object is complete without it.

    Raises MalformedCall as soon as there can be no call.
    """
    scanner, scanned = BracketScanner(), start
    while True:
        if buffer.text[start : start + 1] not in ("{", ""):
            raise MalformedCall
        if (head := _HEAD.match(buffer.text, start)) is not None:
            return head
        first = _FIRST_KEY.match(buffer.text, start)
        if first is not None and first[1].strip('"') not in _KEYS:
            raise MalformedCall
        if scanner.scan(buffer.text, scanned) is not None:
            return None
        scanned = len(buffer.text)
        if buffer.ended:
            raise MalformedCall
        yield None


def _skip_rest(buffer: TextBuffer) -> Wait[None]:
    """Members behind the arguments, and the bracket that closes the call."""
    scanner = BracketScanner(depth=1)
    while (end := scanner.scan(buffer.text)) is None:
        buffer.take(len(buffer.text))
        if buffer.ended:
            return
        yield None
    buffer.take(end)


def _loads(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedCall from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
