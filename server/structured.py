"""What an output has to match, as llguidance's grammar text: from JSON Schema, regex, choices, Lark
or GBNF.

JSON is written compactly, with one optional space behind `,` and `:`, so that a model can never
fill its budget with blanks. Properties come in the order in which the schema lists them. A regex
matches the whole output, and `\\d` is 0 to 9 in it.

All functions can be slow for large inputs: call them in a worker thread. Knows no request.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.grammar import GrammarError
from engine.grammar_matcher import GrammarFactory
from server.json_schema import SchemaError, prepare_schema
from server.limits import MAX_GRAMMAR_CHARS
from server.schema_tree import DEFINITIONS, Path, pointer, subschemas

_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ",[ ]?",
    "key_separator": ":[ ]?",
    "coerce_one_of": False,
    "lenient": False,
}
_COMPACT = {"item_separator": ",", "key_separator": ":"}
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_REMOTE = re.compile(r"Resource '([^']*)' is not present in a registry")
_MAX_REASON_CHARS = 500
_SEARCH_S = 0.2
"""How long the place of a mistake in a schema is looked for."""


class StructuredError(ValueError):
    """One sentence without its full stop; `place` is a JSON pointer into a schema, or empty."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.place = place


def check_grammar(grammar: str, grammars: GrammarFactory, schema: Any = None) -> None:
    """Compile it for a model. `schema`: what it was made of. Raises StructuredError."""
    try:
        grammars.create(grammar)
    except GrammarError as error:
        reason = str(error)
        place = "" if schema is None else pointer(_find_mistake(schema, reason))
        raise StructuredError(_plain_reason(reason), place) from error


def json_schema_grammar(schema: Any, *, compact: bool = False) -> str:
    """The documents that match `schema`; with `compact`, without any blank between their parts.

    Raises StructuredError for what `prepare_schema` refuses.
    """
    try:
        prepared = prepare_schema(schema)
    except SchemaError as error:
        raise StructuredError(error.message, error.place) from error
    return _compiler_input(prepared, _JSON_OPTIONS | (_COMPACT if compact else {}))


def lark_grammar(text: str) -> str:
    """A Lark grammar (llguidance's dialect) whose first symbol is `start`."""
    _check_length(text)
    if not text.strip():
        raise StructuredError("the grammar is empty")
    return json.dumps({"grammars": [{"lark_grammar": text}]}, ensure_ascii=False)


def embedded(lark: str, grammar: str) -> str:
    """A Lark grammar in which `@structured` stands for `grammar`."""
    inner: dict[str, Any] = json.loads(grammar)["grammars"][0]
    grammars = [{"lark_grammar": lark}, inner | {"name": "structured"}]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def any_grammar(text: str) -> str:
    """A Lark grammar or, if it has a `name ::= …`, GBNF. Raises StructuredError."""
    if not _GBNF_RULE.search(text):
        return lark_grammar(text)
    _check_length(text)
    try:
        return lark_grammar(gbnf_to_lark(text))
    except RecursionError as error:
        raise StructuredError("it is nested too deeply") from error
    except Exception as error:  # the library raises bare exceptions for every kind of mistake
        raise StructuredError(_one_line(str(error))) from error


def regex_grammar(pattern: str) -> str:
    """The texts that match `pattern` as a whole (Rust's syntax: no look-around)."""
    _check_length(pattern)
    body = regex_to_lark(pattern, "d")
    return lark_grammar(f"start: /{body}/")


def choice_grammar(choices: Sequence[str]) -> str:
    """One of `choices`, to the letter."""
    _check_length("".join(choices))
    if not choices:
        raise StructuredError("there is no choice")
    return lark_grammar("start: " + " | ".join(map(json.dumps, choices)))


def _compiler_input(schema: Any, options: dict[str, Any]) -> str:
    if not isinstance(schema, dict):
        raise StructuredError("the schema must be an object")
    text = json.dumps(schema, ensure_ascii=False)
    _check_length(text)
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
    except ValueError as error:
        raise StructuredError(_one_line(str(error))) from error


def _check_length(text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise StructuredError(
            f"it is {len(text):,} characters long; at most {MAX_GRAMMAR_CHARS:,} are allowed"
        )


def _find_mistake(schema: Any, reason: str) -> Path:
    """The innermost schema that is refused for the same reason when it stands alone."""
    definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
    deadline_s = time.monotonic() + _SEARCH_S
    path: Path = ()
    node = schema
    while time.monotonic() < deadline_s:
        for step, inner in subschemas(node):
            if time.monotonic() > deadline_s:
                return path
            if _reason_alone(inner, definitions) == reason:
                path, node = path + step, inner
                break
        else:
            return path
    return path


def _reason_alone(schema: Any, definitions: dict[str, Any]) -> str:
    if not isinstance(schema, dict):
        return "" if isinstance(schema, bool) else "schema must be an object or boolean"
    try:
        text = _compiler_input(definitions | schema, _JSON_OPTIONS)
    except StructuredError as error:
        return error.message
    return LLMatcher.validate_grammar(text)


def _plain_reason(reason: str) -> str:
    if found := _UNSUPPORTED.search(reason):
        return f"not supported: {found[1]}"
    if found := _REMOTE.search(reason):
        return f"the reference {found[1]!r} leads out of the schema; nothing is fetched"
    if reason.startswith("oneOf constraints are not supported"):
        return "'oneOf' needs schemas of which no value can match two; use 'anyOf'"
    return _one_line(reason.replace("Expected f64", "Expected a number"))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_REASON_CHARS].rstrip(".")
