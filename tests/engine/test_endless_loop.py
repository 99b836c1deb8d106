"""A model that repeats itself for ever, inside a grammar that offers it no end token."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer

from engine.endless_loop import MAX_PERIOD, MIN_REPEATED, Repetition, single_tokens
from engine.grammar import Grammar, TokenMask
from engine.grammar_matcher import GrammarFactory
from server.structured import json_schema_grammar, lark_grammar
from tests.server.byte_tokenizer import IM_END, VOCAB_SIZE, byte_tokenizer_json

FACTORY = GrammarFactory(byte_tokenizer_json, [IM_END], VOCAB_SIZE)
JOKE = {
    "type": "object",
    "properties": {"setup": {"type": "string"}, "punchline": {"type": "string"}},
    "required": ["setup", "punchline"],
}
LONG = 1_000


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def grammar_of(schema: dict[str, Any]) -> Grammar:
    return FACTORY.create(json_schema_grammar(schema, compact=True))


def allows(mask: TokenMask | None, token_id: int) -> bool:
    assert mask is not None
    return bool(np.unpackbits(mask.view(np.uint8), bitorder="little")[token_id])


def write(grammar: Grammar, wanted: Iterable[int], most: int = LONG) -> str:
    """What comes of a model that wants these bytes, and where it may not have its next one takes
    the first that it may, but no space."""
    wishes = iter(wanted)
    wish = next(wishes)
    written: list[int] = []
    while not grammar.is_terminated and len(written) < most:
        mask = grammar.masks(())[0]
        if allows(mask, wish):
            token, wish = wish, next(wishes)
        else:
            others = (i for i in range(VOCAB_SIZE) if i != ord(" ") and allows(mask, i))
            token = next(others)
        grammar.accept([token])
        written.append(token)
    return bytes(i for i in written if i != IM_END).decode()


def test_a_string_that_repeats_itself_is_closed_and_the_document_goes_on() -> None:
    grammar = grammar_of(JOKE)
    document = json.loads(write(grammar, itertools.cycle(b"a cat is a cat, ")))
    assert grammar.is_terminated
    for text in (document["setup"], document["punchline"]):
        assert MIN_REPEATED <= len(text) <= 2 * (MIN_REPEATED + 16)


@pytest.mark.parametrize(
    ("schema", "start", "loop"),
    [
        (an_object(a={"type": "array", "items": {"type": "string"}}), '{"a":["x"', ',"x"'),
        (an_object(a={"type": "array", "items": {"type": "integer"}}), '{"a":[1', ",1"),
        (
            an_object(a={"type": "array", "items": an_object(n={"type": "string"})}),
            '{"a":[{"n":"x"}',
            ',{"n":"x"}',
        ),
        (
            an_object(a={"type": "array", "items": {"type": "array", "items": {"type": "null"}}}),
            '{"a":[[null]',
            ",[null]",
        ),
        (an_object(a={"type": "string"}), '{"a":"', r"no \"end\" "),
        (an_object(a={"type": "string"}), '{"a":"I', "'m a cat, I"),
        (an_object(a={"type": "string"}), '{"a":"', "0"),
        (an_object(a={"type": "number"}), '{"a":0.', "3"),
    ],
    ids=str,
)
def test_a_loop_over_values_is_closed_too(schema: dict[str, Any], start: str, loop: str) -> None:
    grammar = grammar_of(schema)
    text = write(grammar, itertools.chain(start.encode(), itertools.cycle(loop.encode())), 400)
    assert grammar.is_terminated
    assert text.startswith(start + loop)
    assert list(json.loads(text)) == ["a"]


@pytest.mark.parametrize(
    "text",
    [" ".join(f"{i} times {i} is {i * i}." for i in range(200)), "-" * MIN_REPEATED],
    ids=["no loop", "a loop that ends"],
)
def test_other_strings_stay_whole(text: str) -> None:
    grammar = grammar_of(an_object(a={"type": "string"}))
    document = json.dumps({"a": text}, separators=(",", ":")) + "\0"
    assert json.loads(write(grammar, document.encode(), 9_000)) == {"a": text}


@pytest.mark.parametrize(
    "text", ["start: /(.|\\n)*/", 'start: "<" /[^>]*/ ">"'], ids=["may end", "not JSON"]
)
def test_other_text_is_left_alone(text: str) -> None:
    grammar = FACTORY.create(lark_grammar(text))
    assert write(grammar, itertools.cycle(b"<ha "), 300) == "<ha " * 75


def test_behind_a_string_that_was_a_loop_the_document_goes_on_as_the_model_wants() -> None:
    schema = an_object(a={"type": "string"}) | {"additionalProperties": {"type": "string"}}
    grammar = grammar_of(schema)
    grammar.accept(b'{"a":"')
    for byte in itertools.cycle(b"la "):
        if not allows(grammar.masks(())[0], byte):
            break
        grammar.accept([byte])
    grammar.accept(b'"')
    assert all(allows(grammar.masks(())[0], byte) for byte in b",}")


def test_a_resumed_sequence_and_drafts_see_the_same_masks() -> None:
    plain, loop = grammar_of(JOKE), itertools.cycle(b"la ")
    tokens = list(write(plain, loop).encode())
    plain = grammar_of(JOKE)
    behind = [np.array(mask) for mask in grammar_of(JOKE).masks(tokens[:120])[:-1]]
    for index, token in enumerate(tokens[:120]):
        mask = np.array(plain.masks(())[0], np.int32)
        assert np.array_equal(mask, behind[index])
        resumed = grammar_of(JOKE)
        resumed.accept(tokens[:index])
        if index % 7 == 0 or index > 90:
            assert np.array_equal(mask, np.array(resumed.masks(())[0], np.int32))
        plain.accept([token])


@given(
    st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, 3), min_size=1, max_size=9)
)
def test_a_loop_is_found_by_its_shortest_period_wherever_it_begins(
    before: list[int], loop: list[int]
) -> None:
    repetition = Repetition()
    for token in [*before, *loop]:
        repetition.push(token)
    for token in itertools.islice(itertools.cycle(loop), MIN_REPEATED):
        repetition.push(token)
    period = next(p for p in range(1, 10) if loop == (loop * 2)[p : p + len(loop)])
    assert repetition.period == period
    assert sorted(repetition.loop()) == sorted(loop[:period])
    repetition.push(9)
    assert repetition.period == 0


def test_periods_have_a_bound() -> None:
    for size, is_found in ((MAX_PERIOD, True), (MAX_PERIOD + 1, False)):
        repetition = Repetition()
        for token in list(range(size)) * 5:
            repetition.push(token)
        assert (repetition.period == size) is is_found


@pytest.mark.parametrize("adds_space", [False, True])
def test_tokens_are_found_also_where_every_text_begins_with_a_space(adds_space: bool) -> None:
    description = json.loads(byte_tokenizer_json())
    description["pre_tokenizer"]["add_prefix_space"] = adds_space
    tokenizer = LLTokenizer(json.dumps(description), eos_token=[IM_END])
    assert single_tokens(tokenizer, ['"', "]", "no token"]) == {'"': ord('"'), "]": ord("]")}


def test_a_token_that_ends_a_string_and_goes_on_is_taken_apart() -> None:
    text = byte_tokenizer_json((('"', ","),))
    merged = json.loads(text)["model"]["vocab"]['",']
    grammar = GrammarFactory(lambda: text, [IM_END], merged + 1).create(
        json_schema_grammar(an_object(a={"type": "array", "items": {"type": "string"}}))
    )
    loop = [ord('"'), ord("x"), merged]
    tokens = [*b'{"a":[', *loop * MIN_REPEATED]
    written: list[int] = []
    for token in tokens:
        if not allows(grammar.masks(())[0], token):
            break
        grammar.accept([token])
        written.append(token)
    assert len(written) < len(tokens) and written[-1] == ord("x")
    for byte in b'"]}':
        mask = np.array(grammar.masks(())[0], np.int32)
        assert [i for i in range(merged + 1) if allows(mask, i)] == [byte]
        grammar.accept([byte])
    assert grammar.is_terminated
