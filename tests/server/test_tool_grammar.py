"""What enforced calls can and cannot be, checked with llguidance on a vocabulary of bytes."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from server.errors import InvalidRequest
from server.tool_grammar import Thinking, Vocabulary, tool_grammar
from server.tool_parsers.registry import NAMES, find_family
from server.tools import ToolRequest, read_tool_request

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "n": {"type": "integer"},
        "kind": {"type": "string", "enum": ["a", 'b"c']},
    },
    "required": ["city"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
# One call of `get`, what stands between, one call of `now`, the end.
WRITTEN = {
    "hermes": (
        '<tool_call>\n{"name": "get", "arguments": {"city": "x", "n": 1}}\n</tool_call>',
        "\n",
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "",
    ),
    "generic": (
        '<tool_call>\n{"name": "get", "arguments": {"city": "x", "n": 1}}\n</tool_call>',
        "",
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "",
    ),
    "llama3_json": (
        '{"name": "get", "parameters": {"city": "x"}}',
        "; ",
        '{"name": "now", "parameters": {}}',
        "",
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "get", "arguments": {"city": "x"}}',
        ", ",
        '{"name": "now", "arguments": {}}',
        "]",
    ),
    "pythonic": ('[get(city="x", kind="b\\"c")', ", ", "now()", "]"),
    "qwen3_coder": (
        "<tool_call>\n<function=get>\n<parameter=city>\nOslo </parameter> x\n</parameter>\n"
        "<parameter=n>\n1\n</parameter>\n<parameter=kind>\nb\"c\n</parameter>\n</function>\n"
        "</tool_call>",
        "\n",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "",
    ),
}  # fmt: skip
THOUGHTS = [
    (None, ""),
    (Thinking(True), "hm <b</think>\n\n"),
    (Thinking(False), "<think>h</think>"),
]


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def request(choice: Any = "required", parallel: bool | None = None, **strict: bool) -> ToolRequest:
    tools = [{**tool, "function": {**tool["function"], **strict}} for tool in TOOLS]
    return read_tool_request(tools, choice, parallel)


def accepts(tokenizer: LLTokenizer, lark: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark))
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize(("thinking", "thought"), THOUGHTS)
def test_required_is_one_call_or_more_and_nothing_else(
    tokenizer: LLTokenizer, family: str, thinking: Thinking | None, thought: str
) -> None:
    get, between, now, end = WRITTEN[family]
    lark = tool_grammar(request(), find_family(family), Vocabulary({}), thinking)
    assert accepts(tokenizer, lark, thought + get + end)
    assert accepts(tokenizer, lark, thought + get + between + now + end)
    assert not accepts(tokenizer, lark, thought)
    assert not accepts(tokenizer, lark, thought + "Hello")
    assert not accepts(tokenizer, lark, thought + get + end + "Hello")


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get"}}])
def test_without_parallel_calls_and_with_a_name_it_is_exactly_one(
    tokenizer: LLTokenizer, family: str, choice: Any
) -> None:
    get, between, now, end = WRITTEN[family]
    asked = request(choice, False if choice == "required" else None)
    lark = tool_grammar(asked, find_family(family), Vocabulary({}))
    assert accepts(tokenizer, lark, get + end)
    assert not accepts(tokenizer, lark, get + between + get + end)
    assert not accepts(tokenizer, lark, get + between + now + end)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize(("thinking", "thought"), THOUGHTS)
def test_auto_with_strict_functions_is_any_text_with_right_calls(
    tokenizer: LLTokenizer, family: str, thinking: Thinking | None, thought: str
) -> None:
    get, between, now, end = WRITTEN[family]
    lark = tool_grammar(request("auto", strict=True), find_family(family), Vocabulary({}), thinking)
    assert accepts(tokenizer, lark, thought + get + between + now + end)
    assert accepts(tokenizer, lark, thought + "Hello <b>, (or [not])")
    assert not accepts(tokenizer, lark, thought + get.replace("get", "nope", 1) + end)
    assert not accepts(tokenizer, lark, thought + get.replace("city", "town", 1) + end)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize(("thinking", "thought"), THOUGHTS)
def test_auto_without_parallel_calls_is_text_or_ends_with_the_first_call(
    tokenizer: LLTokenizer, family: str, thinking: Thinking | None, thought: str
) -> None:
    get, between, now, end = WRITTEN[family]
    asked = request("auto", False)
    lark = tool_grammar(asked, find_family(family), Vocabulary({}), thinking)
    assert accepts(tokenizer, lark, thought + get + end)
    assert accepts(tokenizer, lark, thought + "Hello")
    assert not accepts(tokenizer, lark, thought + get + between + now + end)


@pytest.mark.parametrize("family", ["pythonic", "qwen3_coder"])
def test_optional_parameters_may_all_be_left_out(tokenizer: LLTokenizer, family: str) -> None:
    parameters = {"type": "object", "properties": {k: {"type": "integer"} for k in "abc"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    asked = read_tool_request(tools, "required", None)
    lark = tool_grammar(asked, find_family(family), Vocabulary({}))
    for names in ("", "a", "c", "ab", "ac", "bc", "abc"):
        if family == "pythonic":
            text = "[f(" + ", ".join(f"{name}=1" for name in names) + ")]"
        else:
            values = "".join(f"\n<parameter={name}>\n1\n</parameter>" for name in names)
            text = f"<tool_call>\n<function=f>{values}\n</function>\n</tool_call>"
        assert accepts(tokenizer, lark, text), names


@pytest.mark.parametrize("family", ["pythonic", "qwen3_coder"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {}, "anyOf": [{"required": ["a"]}]},
        {"type": "object", "properties": {}, "required": ["a"]},
    ],
)
def test_a_schema_that_is_more_than_properties_is_refused_where_it_cannot_be_enforced(
    family: str, parameters: dict[str, Any]
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(InvalidRequest) as caught:
        tool_grammar(
            read_tool_request(tools, "required", None), find_family(family), Vocabulary({})
        )
    assert caught.value.param == "tools[0].function.parameters"


def test_markers_that_are_control_tokens_are_matched_as_tokens() -> None:
    vocabulary = Vocabulary({"[TOOL_CALLS]": 5, "[ARGS]": 6})
    lark = tool_grammar(request(), find_family("mistral"), vocabulary)
    assert "answer: <[5]>  call  ( <[5]>  call )*" in lark
    assert 'call_1: "now" <[6]> %json' in lark


def test_text_and_calls_that_need_no_enforcement_have_no_grammar() -> None:
    assert not request("auto").needs_grammar
    assert not request("none").needs_grammar
