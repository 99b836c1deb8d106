"""The tools of a chat request: `tools`, `tool_choice` and `parallel_tool_calls`, read and checked.

Rules where OpenAI's text leaves room:
- A function without `parameters`, with `{}` or with empty `properties` takes none: its arguments
  are `{}`.
- Names are unique, 1 to 64 letters, digits, `_` and `-`.
- `tool_choice` "none" shows the model no tools and reads no calls out of its answer.
- `tool_choice` without `tools` is accepted where it asks for nothing ("none", "auto").
- `allowed_tools` narrows what may be called; the prompt still shows all tools.

Knows nothing of prompts, grammars or models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from server.errors import InvalidRequest
from server.limits import MAX_TOOLS

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_OF_NO_PARAMETERS = {"type", "properties", "required", "title", "description", "$schema"}


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """`parameters` is a JSON schema of type object. `where` is the tool's place in the request."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: _NO_PARAMETERS)
    description: str | None = None
    strict: bool = False
    where: str = "tools"

    def definition(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": dict(self.parameters)}}


Functions = Mapping[str, FunctionTool]


class ToolMode(Enum):
    """What the answer may be: text only, text or calls, calls only."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """`shown` is what the prompt tells; `callable` what the answer may call, by name."""

    mode: ToolMode = ToolMode.NONE
    shown: tuple[FunctionTool, ...] = ()
    callable: Functions = field(default_factory=dict)
    is_parallel: bool = True

    @property
    def needs_grammar(self) -> bool:
        """Free text with free calls in it is the only answer that needs no enforcement."""
        if self.mode is ToolMode.AUTO:
            return not self.is_parallel or any(f.strict for f in self.callable.values())
        return self.mode is ToolMode.REQUIRED


def read_tool_request(tools: Any, choice: Any, parallel: bool | None) -> ToolRequest:
    """Raises InvalidRequest naming `tools[i]…` or `tool_choice…`."""
    functions = _read_tools(tools)
    by_name = {function.name: function for function in functions}
    mode, names = _read_choice(choice, by_name)
    if mode is ToolMode.NONE or not functions:
        return ToolRequest()
    return ToolRequest(
        mode=mode,
        shown=functions,
        callable={name: by_name[name] for name in names},
        is_parallel=parallel is not False and not _names_one(choice),
    )


def check_function_name(value: Any, where: str) -> str:
    """Raises InvalidRequest if `value` cannot be the name of a function."""
    if not isinstance(value, str):
        raise InvalidRequest(f"'{where}' must be a string.", param=where)
    if not _NAME.fullmatch(value):
        raise InvalidRequest(
            f"'{where}' must be 1 to 64 letters, digits, '_' or '-'; "
            f"'{value[:80]}' ({len(value)} characters) is not.",
            param=where,
        )
    return value


def _read_tools(value: Any) -> tuple[FunctionTool, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidRequest("'tools' must be a list.", param="tools")
    if len(value) > MAX_TOOLS:
        raise InvalidRequest(
            f"'tools' must have at most {MAX_TOOLS} entries; it has {len(value)}.", param="tools"
        )
    functions = tuple(_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(value))
    seen: set[str] = set()
    for function in functions:
        if function.name in seen:
            raise InvalidRequest(
                f"'{function.where}.name': there is already a function '{function.name}'.",
                param=f"{function.where}.name",
            )
        seen.add(function.name)
    return functions


def _read_tool(tool: Any, where: str) -> FunctionTool:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"'{where}' must be an object.", param=where)
    kind = tool.get("type", "function")
    if kind != "function":
        raise InvalidRequest(
            f"'{where}.type' must be 'function'; other kinds of tools are not served.",
            param=f"{where}.type",
        )
    function, path = tool.get("function"), f"{where}.function"
    if not isinstance(function, dict):
        raise InvalidRequest(f"'{path}' must be an object.", param=path)
    return FunctionTool(
        name=check_function_name(function.get("name"), f"{path}.name"),
        parameters=_read_parameters(function.get("parameters"), f"{path}.parameters"),
        description=_optional(function, "description", str, path),
        strict=_optional(function, "strict", bool, path) or False,
        where=path,
    )


def _read_parameters(value: Any, where: str) -> Mapping[str, Any]:
    if value is None or value == {}:
        return _NO_PARAMETERS
    if not isinstance(value, dict):
        raise InvalidRequest(f"'{where}' must be a JSON schema, an object.", param=where)
    if value.get("type", "object") != "object":
        raise InvalidRequest(
            f"'{where}.type' must be 'object', since arguments are an object.",
            param=f"{where}.type",
        )
    is_empty = value.get("properties") == {} and not value.get("required")
    if is_empty and value.keys() <= _OF_NO_PARAMETERS:
        return _NO_PARAMETERS
    return {"type": "object", **value}


def _read_choice(choice: Any, functions: Functions) -> tuple[ToolMode, tuple[str, ...]]:
    """The mode and the names of the functions that may be called."""
    if choice is None:
        return (ToolMode.AUTO if functions else ToolMode.NONE), tuple(functions)
    if isinstance(choice, str):
        if choice not in {mode.value for mode in ToolMode}:
            raise InvalidRequest(
                f"'tool_choice' must be 'none', 'auto', 'required' or an object that names a "
                f"function; '{choice[:40]}' is not.",
                param="tool_choice",
            )
        mode = ToolMode(choice)
        if mode is ToolMode.REQUIRED and not functions:
            raise InvalidRequest("'tool_choice' is 'required', but there are no 'tools'.",
                                 param="tool_choice")  # fmt: skip
        return mode, tuple(functions)
    if not isinstance(choice, dict):
        raise InvalidRequest("'tool_choice' must be a string or an object.", param="tool_choice")
    if choice.get("type") == "allowed_tools":
        return _read_allowed(choice.get("allowed_tools"), functions)
    return ToolMode.REQUIRED, (_read_named(choice, "tool_choice", functions),)


def _read_allowed(value: Any, functions: Functions) -> tuple[ToolMode, tuple[str, ...]]:
    where = "tool_choice.allowed_tools"
    tools = value.get("tools") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(tools, list) or not tools:
        raise InvalidRequest(f"'{where}.tools' must be a list of tools.", param=f"{where}.tools")
    if value.get("mode") not in ("auto", "required"):
        raise InvalidRequest(f"'{where}.mode' must be 'auto' or 'required'.", param=f"{where}.mode")
    names = [_read_named(t, f"{where}.tools[{i}]", functions) for i, t in enumerate(tools)]
    return ToolMode(value["mode"]), tuple(dict.fromkeys(names))


def _read_named(value: Any, where: str, functions: Functions) -> str:
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        raise InvalidRequest(f"'{where}.type' must be 'function'.", param=f"{where}.type")
    function = value.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"'{where}.function' must be an object.", param=f"{where}.function")
    name = check_function_name(function.get("name"), f"{where}.function.name")
    if name not in functions:
        raise InvalidRequest(
            f"'{where}' names the function '{name}', which is not in 'tools'.",
            param=f"{where}.function.name",
        )
    return name


def _names_one(choice: Any) -> bool:
    """A named choice asks for exactly one call."""
    return isinstance(choice, dict) and choice.get("type") != "allowed_tools"


def _optional(function: dict[str, Any], key: str, kind: type[Any], where: str) -> Any:
    value = function.get(key)
    if value is not None and not isinstance(value, kind):
        raise InvalidRequest(
            f"'{where}.{key}' must be a {'string' if kind is str else 'boolean'}.",
            param=f"{where}.{key}",
        )
    return value
