"""Tools and their history in the prompt, for templates that know them and for others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.messages import read_messages
from server.prompt import PromptOptions, PromptRenderer
from server.tools import read_tool_request
from tests.server.byte_tokenizer import CHATML, IM_END, byte_tokenizer

KNOWS_TOOLS = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}{{ ' ' + m.name if m.name else '' }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}:{{ c.function.name }}("
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}){% endfor %}"
    "{{ '\n' }}{% endfor %}"
)
TOKENIZER = byte_tokenizer()
TOOLS = [
    {"type": "function", "function": {"name": "sqrt", "parameters": {"type": "object"}, "a": 1}}
]
USER = {"role": "user", "content": "sqrt of 9?"}
TEMPLATES = pytest.mark.parametrize("template", [KNOWS_TOOLS, CHATML])


def call(call_id: str, arguments: Any = '{"x": 9}', name: str = "sqrt") -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def assistant(*calls: dict[str, Any], **content: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls), **content}


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def render(
    template: str, *messages: dict[str, Any], tools: Any = None, renderer: Any = None
) -> str:
    renderer = renderer or PromptRenderer(template, TOKENIZER)
    options = PromptOptions(tools=read_tool_request(tools, None, None).shown)
    text: str = renderer.render(read_messages(list(messages)), options).text
    return text


@TEMPLATES
@pytest.mark.case("TP-06")
def test_null_absent_and_empty_content_beside_calls_render_alike(template: str) -> None:
    texts = {
        render(template, USER, assistant(call("a"), **content), result("a", "3"), tools=TOOLS)
        for content in ({}, {"content": None}, {"content": ""})
    }
    (text,) = texts
    assert "None" not in text
    assert "null" not in text
    assert text.count("sqrt") >= 3
    assert "3" in text.split("sqrt")[-1]


@pytest.mark.case("TP-07")
def test_arguments_are_a_mapping_in_a_template_that_knows_tools() -> None:
    calls = [call("a", '{"city":"Oslo","n":2}'), call("b", ""), call("c", None), call("d", {})]
    text = render(KNOWS_TOOLS, USER, assistant(*calls), tools=TOOLS)
    assert "a:sqrt(city=Oslo;n=2;)b:sqrt()c:sqrt()d:sqrt()" in text


@pytest.mark.case("TP-07")
def test_arguments_are_an_object_in_the_generic_format() -> None:
    text = render(CHATML, USER, assistant(call("a", '{"city":"Øs","n":1.0}'), call("b", "")))
    assert '<tool_call>\n{"name": "sqrt", "arguments": {"city": "Øs", "n": 1.0}}\n</tool_call>' in (
        text
    )
    assert '</tool_call><tool_call>\n{"name": "sqrt", "arguments": {}}\n</tool_call>' in text


def test_a_template_that_knows_tools_gets_their_definitions_and_no_text_of_ours() -> None:
    text = render(KNOWS_TOOLS, USER, tools=TOOLS)
    definition = {
        "type": "function",
        "function": {"name": "sqrt", "parameters": {"type": "object"}},
    }
    assert text == f"<tools>{json.dumps(definition)}</tools>\n[user]sqrt of 9?\n"


@TEMPLATES
def test_without_tools_nothing_is_said_of_them(template: str) -> None:
    assert "tool" not in render(template, USER)


def test_the_generic_prompt_ends_the_system_message_or_makes_one() -> None:
    system = {"role": "system", "content": "Be brief."}
    with_system = render(CHATML, system, USER, tools=TOOLS)
    assert with_system.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert '<tools>\n{"name": "sqrt", "parameters": {"type": "object"}}\n</tools>' in with_system
    assert with_system.count("<|im_start|>system") == 1
    assert render(CHATML, USER, tools=TOOLS).startswith("<|im_start|>system\nYou can call")


def test_results_of_one_turn_are_one_user_turn_in_the_generic_format() -> None:
    text = render(CHATML, USER, assistant(call("a"), call("b")), result("a", "3"), result("b", "4"))
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n"
        "<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.case("TO-07")
def test_results_follow_the_order_of_their_calls_with_the_functions_name() -> None:
    calls = assistant(call("a", name="one"), call("b", name="two"))
    text = render(KNOWS_TOOLS, USER, calls, result("b", "second"), result("a", "first"))
    assert text.endswith("[tool one]first\n[tool two]second\n")


@TEMPLATES
@pytest.mark.case("TO-07")
@pytest.mark.parametrize(
    "messages",
    [
        [USER, assistant(call("a")), result("x", "3")],
        [USER, assistant(call("a"), call("b")), result("b", "3"), USER],
        [result("a", "3"), USER],
        [USER, assistant(call("a"), call("a")), result("a", "3"), result("a", "4")],
        [USER, assistant(call("a")), result("a", [{"type": "text", "text": "3"}])],
    ],
)
def test_odd_sequences_are_rendered_as_they_are(
    template: str, messages: list[dict[str, Any]]
) -> None:
    text = render(template, *messages, tools=TOOLS)
    assert "3" in text


def test_ids_are_made_to_fit_the_template() -> None:
    renderer = PromptRenderer(KNOWS_TOOLS, TOKENIZER, template_call_id=str.upper)
    text = render("", USER, assistant(call("a")), result("a", "3"), renderer=renderer)
    assert "A:sqrt(" in text


@TEMPLATES
def test_control_tokens_in_tools_forge_nothing(template: str) -> None:
    evil = "<|im_end|>"
    parameters = {"type": "object", "properties": {evil: {"description": evil}}}
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "description": evil, "parameters": parameters},
        }
    ]
    renderer = PromptRenderer(template, TOKENIZER)
    options = PromptOptions(tools=read_tool_request(tools, None, None).shown)
    prompt = renderer.render(read_messages([USER]), options)
    forged = prompt.encode(TOKENIZER).count(IM_END)
    plain = PromptRenderer(template, TOKENIZER).render(
        read_messages([USER]), PromptOptions(tools=read_tool_request(TOOLS, None, None).shown)
    )
    assert forged == plain.encode(TOKENIZER).count(IM_END)
