"""The grammar that makes a model call: Lark text with the functions' schemas inside.

- mode REQUIRED: the answer is calls and nothing else, one or more; exactly one if calls are not
  parallel or one function is named.
- mode AUTO with strict functions or without parallel calls: free text in which, once a call has
  begun, only a right one can follow. Without parallel calls nothing follows the first.

A reasoning model may think first (`reasoning.py`). Arguments of functions that are not strict are
held to their schema too: that can only help. Knows llguidance's dialect of Lark; not how a grammar
is run or checked (`structured.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from server.reasoning import END as THINK_END
from server.reasoning import START as THINK_START
from server.tool_parsers.family import CallSyntax, ToolFamily
from server.tools import ToolMode, ToolRequest

_TEXT = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a grammar must know of a model's tokens: its control tokens, text → id."""

    control_tokens: Mapping[str, int]

    def literal(self, text: str) -> str:
        """A Lark expression that matches `text`; control tokens in it are matched as tokens."""
        pieces = _split(text, self.control_tokens) if self.control_tokens else [text]
        return " ".join(
            f"<[{self.control_tokens[piece]}]>"
            if piece in self.control_tokens
            else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )


@dataclass(frozen=True, slots=True)
class Thinking:
    """Whether an answer may begin with a thought, and whether the prompt has begun it already."""

    is_open: bool


def tool_grammar(
    request: ToolRequest,
    family: ToolFamily,
    vocabulary: Vocabulary,
    thinking: Thinking | None = None,
) -> str:
    """Lark text for a request that `needs_grammar`.

    Raises InvalidRequest if the family cannot write calls of a function's schema.
    """
    syntax = family.syntax(vocabulary.control_tokens)
    answer = (
        _calls(request, syntax, vocabulary)
        if request.mode is ToolMode.REQUIRED
        else _text_with_calls(request, family, syntax, vocabulary, thinking)
    )
    rules = [_start(thinking, vocabulary), answer, *_functions(request, syntax, vocabulary)]
    return "\n".join([*rules, syntax.rules, ""])


def structured_rules(
    request: ToolRequest,
    family: ToolFamily,
    vocabulary: Vocabulary,
    thinking: Thinking | None = None,
) -> str:
    """Lark text for an answer that is `@structured` or, if there are tools, calls instead.

    "" if the answer is `@structured` and nothing else. Raises InvalidRequest as `tool_grammar`.
    """
    if request.mode is ToolMode.NONE:
        return thinking_rules(thinking, vocabulary, "@structured") if thinking else ""
    syntax = family.syntax(vocabulary.control_tokens)
    start = thinking_rules(thinking, vocabulary, "(answer | @structured)")
    rules = [start, _calls(request, syntax, vocabulary), *_functions(request, syntax, vocabulary)]
    return "\n".join([*rules, syntax.rules, ""])


def thinking_rules(thinking: Thinking | None, vocabulary: Vocabulary, answer: str) -> str:
    """The rule `start`: the expression `answer`, after a thought if there may be one."""
    if thinking is None:
        return f"start: {answer}"
    end = vocabulary.literal(THINK_END)
    is_control = THINK_END in vocabulary.control_tokens
    thought = (
        f"thought: {_TEXT} {end}"
        if is_control
        else f"thought[suffix={json.dumps(THINK_END)}]: {_TEXT}"
    )
    start = vocabulary.literal(THINK_START)
    begun = f"thought {_GAP}" if thinking.is_open else f"({start} thought {_GAP})?"
    return f"start: {begun} {answer}\n{thought}"


_GAP = r"/\n{0,2}/"


def _start(thinking: Thinking | None, vocabulary: Vocabulary) -> str:
    return thinking_rules(thinking, vocabulary, "answer")


def _calls(request: ToolRequest, syntax: CallSyntax, vocabulary: Vocabulary) -> str:
    """`answer` for calls only."""
    literal = vocabulary.literal
    before = f"{literal(syntax.trigger)} {literal(syntax.open)}"
    after, between = literal(syntax.close), literal(syntax.between)
    if not request.is_parallel:
        return f"answer: {before} call {after}"
    if syntax.repeats_trigger:
        return f"answer: {before} call {after} ({between} {before} call {after})*"
    return f"answer: {before} call ({between} call)* {after}"


def _text_with_calls(
    request: ToolRequest,
    family: ToolFamily,
    syntax: CallSyntax,
    vocabulary: Vocabulary,
    thinking: Thinking | None,
) -> str:
    """`answer` for text that may hold calls."""
    if not syntax.trigger:
        # A thought is no free text either: text behind it could be a second call.
        first = re.escape(family.bare) + ("<" if thinking and not thinking.is_open else "")
        free = rf"/\s*([^\s{first}](.|\n)*)?/"
        return f"answer: calls | {free}\n" + _calls(request, syntax, vocabulary).replace(
            "answer:", "calls:", 1
        )
    literal = vocabulary.literal
    body = f"{literal(syntax.open)} call {literal(syntax.close)}"
    if request.is_parallel and not syntax.repeats_trigger:
        more = f"({literal(syntax.between)} call)*"
        body = f"{literal(syntax.open)} call {more} {literal(syntax.close)}"
    head = (
        f"head: {_TEXT} {literal(syntax.trigger)}"
        if syntax.trigger in vocabulary.control_tokens
        else f"head[suffix={json.dumps(syntax.trigger)}]: {_TEXT}"
    )
    if request.is_parallel:
        return f"answer: (head {body})* {_TEXT}\n{head}"
    return f"answer: head {body} | {_TEXT}\n{head}"


def _functions(request: ToolRequest, syntax: CallSyntax, vocabulary: Vocabulary) -> list[str]:
    """`call` and a rule for each function."""
    rules = [
        f"call_{i}: {syntax.call(function, vocabulary.literal)}"
        for i, function in enumerate(request.callable.values())
    ]
    return ["call: " + " | ".join(f"call_{i}" for i in range(len(rules))), *rules]


def _split(text: str, control_tokens: Mapping[str, int]) -> list[str]:
    texts = sorted(control_tokens, key=len, reverse=True)
    return re.split("(" + "|".join(map(re.escape, texts)) + ")", text)
