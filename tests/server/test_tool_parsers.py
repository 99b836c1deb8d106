"""One table for the parsers of all families, and the rules that hold for every one of them."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tool_parsers import registry
from server.tool_parsers.family import CallArguments, CallStart, Text
from server.tool_parsers.mistral import template_call_id
from server.tool_parsers.parser import ToolCallParser
from server.tools import FunctionTool

OBJECT = {"type": "object"}
PROPERTIES = {
    "city": {"type": "string"},
    "n": {"type": "number"},
    "o": OBJECT,
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "kind": {"enum": ["1", "2"]},
}
FUNCTIONS = {
    name: FunctionTool(name, {"type": "object", "properties": PROPERTIES})
    for name in ("get", "now", "get-it")
}


@dataclass
class Parsed:
    """The joined content, and name and joined arguments of each call."""

    content: str
    calls: list[tuple[str, str]]


def parse(family: str, *pieces: str) -> Parsed:
    parser = ToolCallParser(registry.find_family(family), FUNCTIONS)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    parsed = Parsed("", [])
    for event in events:
        match event:
            case Text(text, start):
                assert text and "".join(pieces)[start : start + len(text)] == text
                parsed.content += text
            case CallStart(name):
                parsed.calls.append((name, ""))
            case CallArguments(text):
                name, before = parsed.calls[-1]
                parsed.calls[-1] = (name, before + text)
    assert parser.num_decided == len("".join(pieces))
    return parsed


Row = tuple[str, str, list[tuple[str, str]]]

HERMES: list[Row] = [
    (
        '<tool_call>\n{"name": "get", "arguments": {"city": "Oslo"}}\n</tool_call>',
        "",
        [("get", '{"city": "Oslo"}')],
    ),
    (
        'Sure.\n\n<tool_call>{"name":"get","arguments":{"n":1.0}}</tool_call>\n'
        '<tool_call>\n{"name": "now"}\n</tool_call>\nDone. ',
        "Sure.\nDone. ",
        [("get", '{"n":1.0}'), ("now", "{}")],
    ),
    (
        '<tool_call>{"name": "get", "arguments": {"city": "</tool_call>\\" \\u00e9 é\\n{["}}'
        "</tool_call>",
        "",
        [("get", '{"city": "</tool_call>\\" \\u00e9 é\\n{["}')],
    ),
    (
        '<tool_call>{"arguments": {"o": {"a": [1, {}]}}, "name": "get"}</tool_call>',
        "",
        [("get", '{"o": {"a": [1, {}]}}')],
    ),
    (
        '<tool_call>{"id": "x", "type": "function", "function": {"name": "now"}}</tool_call>',
        "",
        [("now", "{}")],
    ),
    (
        '<tool_call>{"name": "get", "arguments": "{\\"n\\": 2}"}</tool_call>',
        "",
        [("get", '{"n": 2}')],
    ),
    ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
    (
        '<tool_call>{"name": "get", "arguments": {"n": 1}, "why": "}"}</tool_call>x',
        "x",
        [("get", '{"n": 1}')],
    ),
    # The closing tag is missing, or cut.
    (
        '<tool_call>{"name": "now", "arguments": {}}\n<tool_call>{"name": "now"}\n</tool_',
        "",
        [("now", "{}"), ("now", "{}")],
    ),
    # Cut inside the arguments: as the model wrote them.
    ('<tool_call>{"name": "get", "arguments": {"city": "Os', "", [("get", '{"city": "Os')]),
    # No calls: all of it is text.
    *[
        (text, text, [])
        for text in (
            "",
            " \n",
            "  a <tool_cal b <",
            "<tool_call>",
            "<tool_call>hello</tool_call> x",
            '<tool_call>{"name": "nope", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "nope"}</tool_call>',
            '<tool_call>{"name": "get", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "get", "arguments": {"n": NaN}, }</tool_call>'.replace(
                '{"n": NaN}, ', '"x"'
            ),
            '<tool_call>{"city": "Oslo"}</tool_call>',
            '<tool_call>{"name": "get", "argum',
            '{"name": "get", "arguments": {}}',
        )
    ],
    (
        '<tool_call> <tool_call>{"name": "now"}</tool_call>',
        "<tool_call>",
        [("now", "{}")],
    ),
]

LLAMA3_JSON: list[Row] = [
    ('{"name": "get", "parameters": {"city": "Oslo"}}', "", [("get", '{"city": "Oslo"}')]),
    (
        ' {"type": "function", "name": "get", "parameters": {"n": 1}}; {"name": "now"}\n',
        "",
        [("get", '{"n": 1}'), ("now", "{}")],
    ),
    ('<|python_tag|>{"name": "now", "parameters": {}}', "", [("now", "{}")]),
    ('Look: <|python_tag|>{"name": "now"}', "Look:", [("now", "{}")]),
    ('{"name": "now"}; {"a": 1}', '; {"a": 1}', [("now", "{}")]),
    *[
        (text, text, [])
        for text in (
            '{"answer": 42}',
            '{"name": "Bob", "parameters": {}}',
            'x {"name": "now"}',
            '{"name": "now", "parameters"',
            "{",
        )
    ],
]

MISTRAL: list[Row] = [
    (
        '[TOOL_CALLS] [{"name": "get", "arguments": {"city": "]"}}, {"name": "now"}]',
        "",
        [("get", '{"city": "]"}'), ("now", "{}")],
    ),
    ('Hm. [TOOL_CALLS]{"name": "now", "arguments": {}}', "Hm.", [("now", "{}")]),
    (
        '[TOOL_CALLS]get[ARGS]{"n": 1.0}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}',
        "",
        [("get", '{"n": 1.0}'), ("now", "{}")],
    ),
    ('[TOOL_CALLS]get-it{"n": 1}', "", [("get-it", '{"n": 1}')]),
    *[
        (text, text, [])
        for text in (
            "[TOOL_CALLS]",
            "[TOOL_CALLS]nope[ARGS]{}",
            "[TOOL_CALLS]get[ARGS]x",
            '[TOOL_CALLS][{"name": "nope", "arguments": {}}]',
            "[TOOL_CALL",
        )
    ],
]

PYTHONIC: list[Row] = [
    (
        '[get(city="O[)\\" \\u00e9", n=-1.0, o={"a": [True, None, (1,)]}), now()]',
        "",
        [
            ("get", '{"city": "O[)\\" é", "n": -1.0, "o": {"a": [true, null, [1]]}}'),
            ("now", "{}"),
        ],
    ),
    ("[now( )]", "", [("now", "{}")]),
    ("[get-it(maybe=null, o={})]", "", [("get-it", '{"maybe": null, "o": {}}')]),
    ("<|python_start|>[now()]<|python_end|>", "", [("now", "{}")]),
    ("[now(), nope()]", ", nope()]", [("now", "{}")]),
    ("[get(city='\\d')]", "", [("get", '{"city": "\\\\d"}')]),
    *[
        (text, text, [])
        for text in (
            "[1, 2]",
            "[a link](now)",
            "[get(1)]",
            "[get(n=1, n=2)]",
            "[get(n=open('x'))]",
            "[get(o={1: 2})]",
            "[get(n=1e999)]",
            "[get(city=",
            "[get(o=" + "[" * 70 + "]" * 70 + ")]",
            "[get(n=1",
            "now()",
        )
    ],
]

QWEN3_CODER: list[Row] = [
    (
        "<tool_call>\n<function=get>\n<parameter=city>\nOslo </parameter> <b>\n"
        "</parameter>\n<parameter=n>\n1.0\n</parameter>\n</function>\n</tool_call>",
        "",
        [("get", '{"city": "Oslo </parameter> <b>", "n": 1.0}')],
    ),
    (
        "Ok.\n<function=now>\n</function>\n<tool_call><function=get><parameter=o>"
        '{"a": [1]}</parameter><parameter=maybe>None</parameter></function></tool_call>',
        "Ok.",
        [("now", "{}"), ("get", '{"o": {"a": [1]}, "maybe": null}')],
    ),
    (
        "<function=get><parameter=city>12</parameter><parameter=kind>1</parameter>"
        "<parameter=maybe>12</parameter><parameter=x>a\nb</parameter></function>",
        "",
        [("get", '{"city": "12", "kind": "1", "maybe": 12, "x": "a\\nb"}')],
    ),
    # Cut: in a value, and behind one.
    ("<function=get><parameter=city>Os", "", [("get", "")]),
    ("<function=get><parameter=n>1</parameter>\n<para", "", [("get", '{"n": 1')]),
    *[
        (text, text, [])
        for text in (
            "<function=nope></function>",
            "<tool_call>\nget()\n</tool_call>",
            "<function=get",
            "<func",
        )
    ],
]

TABLE = [
    (family, *row)
    for family, rows in {
        "hermes": HERMES,
        "generic": HERMES,
        "llama3_json": LLAMA3_JSON,
        "mistral": MISTRAL,
        "pythonic": PYTHONIC,
        "qwen3_coder": QWEN3_CODER,
    }.items()
    for row in rows
]


@pytest.mark.parametrize(("family", "text", "content", "calls"), TABLE)
def test_a_text_is_content_and_calls_however_it_is_cut(
    family: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    expected = Parsed(content, calls)
    assert parse(family, text) == expected
    assert parse(family, *text) == expected
    assert parse(family, *(text[i : i + 7] for i in range(0, len(text), 7))) == expected


FRAGMENTS = st.sampled_from(
    [text for _, text, _, _ in TABLE if len(text) < 90]
    + ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", '{"name": "get", "arguments": {"n": 1}}']
    + ['"', "\\", "{", "}", "[", "]", ")", ";", ",", " ", "\n", "x", "<", "é", "😀"]
)


@given(
    family=st.sampled_from(registry.NAMES),
    text=st.lists(FRAGMENTS, max_size=8).map("".join),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=12),
)
def test_any_cut_of_any_text_gives_the_same(family: str, text: str, sizes: list[int]) -> None:
    pieces: list[str] = []
    rest = text
    while rest:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(rest[:size])
        rest = rest[size:]
    assert parse(family, *pieces) == parse(family, text)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4), st.booleans())
def test_json_arguments_come_out_to_the_character(
    arguments: dict[str, object], ascii_only: bool
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    call = f'<tool_call>{{"name": "get", "arguments": {written}}}</tool_call>'
    assert parse("hermes", *call) == Parsed("", [("get", written)])


@given(st.text(), st.sampled_from(registry.NAMES))
def test_text_without_calls_is_all_content(text: str, family: str) -> None:
    assert parse(family, text).content == text


def test_arguments_and_content_are_not_held_back_for_long() -> None:
    parser = ToolCallParser(registry.find_family("hermes"), FUNCTIONS)
    assert parser.feed("Hello <") == [Text("Hello", 0)]
    assert parser.feed("b>") == [Text(" <b>", 5)]
    assert parser.feed('<tool_call>{"name": "get", "arguments": ') == []
    assert parser.feed('{"ci') == [CallStart("get"), CallArguments('{"ci')]
    assert parser.feed('ty": "') == [CallArguments('ty": "')]


def test_a_pathologically_long_answer_takes_linear_time() -> None:
    deep = '{"name": "get", "arguments": {"o": ' + '{"a": "\\"' * 10_000
    assert parse("llama3_json", *deep).calls == [("get", deep[29:])]


def test_every_family_has_its_own_name_and_an_unknown_one_is_an_error() -> None:
    assert [registry.find_family(name).name for name in registry.NAMES] == list(registry.NAMES)
    with pytest.raises(KeyError):
        registry.find_family("os")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<tool_call>\n<function=example>", "qwen3_coder"),
        ("<|python_start|>[f()]<|python_end|>", "pythonic"),
        ("<|python_tag|>", "llama3_json"),
        ("Environment: ipython", "llama3_json"),
        ("<tool_call>{}</tool_call>", "hermes"),
        ("", "hermes"),
        (None, "hermes"),
    ],
)
def test_a_template_names_its_family(template: str | None, name: str) -> None:
    assert registry.name_for_template(template) == name


def test_mistral_templates_get_ids_of_nine_characters_that_differ() -> None:
    ids = {template_call_id(f"call_{i}") for i in range(100)}
    assert len(ids) == 100
    assert all(len(i) == 9 and i.isalnum() for i in ids)
    assert template_call_id("abcDEF123") == "abcDEF123"
