"""`functions` and `function_call`: what tools were called before, and old clients still send.

A request with them becomes one with tools, of which an answer may call one; errors about it name
the fields that the client sent. How the answer is written in the old form is the chat adapter's.
Knows JSON; not what tools are.
"""

from __future__ import annotations

import re
from typing import Any

from server.errors import InvalidRequest

_OLD_WORDS = (
    (re.compile(r"\btools\[(\d+)\]\.function\b"), r"functions[\1]"),
    (re.compile(r"\btools\[(\d+)\]"), r"functions[\1]"),
    (re.compile(r"\btools\b"), "functions"),
    (re.compile(r"\btool_choice(\.function)?\b"), "function_call"),
)
_QUOTED = re.compile(r"'[^']*'")


def uses_functions(value: dict[str, Any]) -> bool:
    return bool(value.get("functions"))


def with_tools(value: dict[str, Any]) -> dict[str, Any]:
    """The same request in today's words. Raises InvalidRequest."""
    if value.get("tools"):
        raise InvalidRequest("'functions' cannot stand beside 'tools'.", param="functions")
    functions = value["functions"]
    if not isinstance(functions, list):
        raise InvalidRequest("'functions' must be a list.", param="functions")
    tools = [{"type": "function", "function": function} for function in functions]
    choice = value.get("function_call")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    elif choice not in (None, "none", "auto"):
        raise InvalidRequest(
            "'function_call' must be 'none', 'auto' or an object that names a function.",
            param="function_call",
        )
    rest = {key: item for key, item in value.items() if key not in ("functions", "function_call")}
    return rest | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}


def in_old_words(error: InvalidRequest) -> InvalidRequest:
    """An error about the request with tools, with the fields named as the client wrote them."""
    if error.param is not None:
        error.param = _renamed(error.param)
    error.message = _QUOTED.sub(lambda match: _renamed(match[0]), error.message)
    return error


def _renamed(path: str) -> str:
    for pattern, old in _OLD_WORDS:
        path = pattern.sub(old, path)
    return path
