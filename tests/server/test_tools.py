"""`tools` and `tool_choice` as a client sends them."""

from __future__ import annotations

from typing import Any

import pytest

from server.errors import InvalidRequest
from server.tools import ToolMode, read_tool_request


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def refused(tools: Any, choice: Any = None) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        read_tool_request(tools, choice, None)
    return caught.value.param


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("f", "tools"),
        ({}, "tools"),
        ([tool()] * 129, "tools"),
        (["f"], "tools[0]"),
        ([tool(), {"type": "custom", "custom": {}}], "tools[1].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": "f"}], "tools[0].function"),
        ([tool(None)], "tools[0].function.name"),
        ([tool(3)], "tools[0].function.name"),
        ([tool("")], "tools[0].function.name"),
        ([tool("get time")], "tools[0].function.name"),
        ([tool("x" * 65)], "tools[0].function.name"),
        ([tool("f\n")], "tools[0].function.name"),
        ([tool("a"), tool("b"), tool("a")], "tools[2].function.name"),
        ([tool(description=3)], "tools[0].function.description"),
        ([tool(strict="yes")], "tools[0].function.strict"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters={"type": "array"})], "tools[0].function.parameters.type"),
    ],
)
def test_a_wrong_tool_is_refused_by_its_place(tools: Any, param: str) -> None:
    assert refused(tools) == param


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("any", "tool_choice"),
        (3, "tool_choice"),
        ([], "tool_choice"),
        ({}, "tool_choice.function"),
        ({"type": "tool"}, "tool_choice.type"),
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        (named("nope"), "tool_choice.function.name"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools.tools"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [named("f")]}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("g")]}},
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
    ],
)
def test_a_wrong_choice_is_refused_by_its_place(choice: Any, param: str) -> None:
    assert refused([tool()], choice) == param


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", ["required", named("f")])
def test_a_call_cannot_be_required_without_tools(tools: Any, choice: Any) -> None:
    assert str(refused(tools, choice)).startswith("tool_choice")


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_a_choice_that_asks_for_nothing_needs_no_tools(choice: Any) -> None:
    assert read_tool_request(None, choice, True).mode is ToolMode.NONE


def test_none_shows_and_offers_nothing() -> None:
    request = read_tool_request([tool()], "none", None)
    assert (request.mode, request.shown, request.callable) == (ToolMode.NONE, (), {})


@pytest.mark.parametrize(
    ("choice", "parallel", "mode", "is_parallel"),
    [
        (None, None, ToolMode.AUTO, True),
        ("auto", False, ToolMode.AUTO, False),
        ("required", True, ToolMode.REQUIRED, True),
        ("required", False, ToolMode.REQUIRED, False),
        (named("b"), True, ToolMode.REQUIRED, False),
    ],
)
def test_a_choice_has_a_mode(
    choice: Any, parallel: bool | None, mode: ToolMode, is_parallel: bool
) -> None:
    request = read_tool_request([tool("a"), tool("b")], choice, parallel)
    assert (request.mode, request.is_parallel) == (mode, is_parallel)
    assert list(request.callable) == (["b"] if isinstance(choice, dict) else ["a", "b"])


def test_allowed_tools_narrow_what_may_be_called_and_not_what_is_shown() -> None:
    allowed = {"mode": "required", "tools": [named("b"), named("b")]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    request = read_tool_request([tool("a"), tool("b")], choice, None)
    assert [f.name for f in request.shown] == ["a", "b"]
    assert (list(request.callable), request.mode) == (["b"], ToolMode.REQUIRED)


@pytest.mark.parametrize(
    "function",
    [
        {},
        {"parameters": None},
        {"parameters": {}},
        {"parameters": {"type": "object", "properties": {}, "title": "F", "required": []}},
    ],
)
def test_a_function_without_parameters_takes_none(function: dict[str, Any]) -> None:
    (read,) = read_tool_request([tool(**function)], None, None).shown
    assert read.parameters == {"type": "object", "properties": {}, "additionalProperties": False}


def test_128_tools_and_unknown_fields_are_fine() -> None:
    tools = [tool(f"f{i}", whatever=1) | {"x": 1} for i in range(128)]
    assert len(read_tool_request(tools, "auto", None).shown) == 128
