"""The fields with which a request asks for structured output, to one grammar.

`response_format` is OpenAI's, `structured_outputs` and `guided_…` are vLLM's, `grammar` and
`json_schema` are llama.cpp's. A schema means the same with and without `strict`: it is enforced.
That of a `response_format` is also told to the model, as at OpenAI; the others are not, as at vLLM.
At most one of them may ask for something. What is wrong is an InvalidRequest that names the field
and, in a schema, the place.

Knows the fields; not how a grammar is made (`structured.py`) or combined with tools and thoughts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.grammar_matcher import GrammarFactory
from server.errors import InvalidRequest
from server.json_body import check_depth, check_text
from server.protocol import GenerationBody, ResponseFormat, StructuredOutputs
from server.structured import (
    StructuredError,
    any_grammar,
    check_grammar,
    choice_grammar,
    json_schema_grammar,
    regex_grammar,
)

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Constraint:
    """One ask. `what` is how errors call it; `schema` is the JSON Schema, if it is one, and
    `told` the schema that the prompt tells the model of, if it does."""

    param: str
    what: str
    build: Callable[[], str]
    schema: Any = None
    told: dict[str, Any] | None = None


def read_constraint(body: GenerationBody) -> Constraint | None:
    """What the request asks for, not compiled yet. Quick. Raises InvalidRequest."""
    found = [
        *_of_response_format(body.response_format),
        *_of_structured_outputs(body.structured_outputs),
        *_of_json("guided_json", body.guided_json),
        *_of_regex("guided_regex", body.guided_regex),
        *_of_choice("guided_choice", body.guided_choice),
        *_of_grammar("guided_grammar", body.guided_grammar),
        *_of_json("json_schema", body.json_schema),
        *_of_grammar("grammar", body.grammar),
    ]
    if len(found) > 1:
        names = " and ".join(f"'{constraint.param}'" for constraint in found[:2])
        raise InvalidRequest(
            f"{names} cannot both say what the output must match.", param=found[1].param
        )
    return found[0] if found else None


def compile_constraint(constraint: Constraint, grammars: GrammarFactory) -> str:
    """Its grammar text, compiled once for the model. Slow: call it in a worker thread.

    Raises InvalidRequest.
    """
    try:
        grammar = constraint.build()
        check_grammar(grammar, grammars, constraint.schema)
    except StructuredError as error:
        where = f" at '{error.place}'" if error.place else ""
        raise InvalidRequest(
            f"Invalid {constraint.what} in '{constraint.param}'{where}: {error.message}.",
            param=constraint.param,
        ) from error
    return grammar


def _of_response_format(asked: ResponseFormat | None) -> list[Constraint]:
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return _of_json("response_format", _ANY_OBJECT if asked.schema_ is None else asked.schema_)
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        raise InvalidRequest(
            "'response_format' of type 'json_schema' needs a 'json_schema' with a 'schema'.",
            param="response_format",
        )
    schema, description = asked.json_schema.schema_, asked.json_schema.description
    told = {"description": description, **schema} if description else schema
    return [replace(c, told=told) for c in _of_json("response_format", schema)]


def _of_structured_outputs(asked: StructuredOutputs | None) -> list[Constraint]:
    if asked is None:
        return []
    for name in ("structural_tag", "whitespace_pattern", "disable_additional_properties"):
        if getattr(asked, name):
            raise InvalidRequest(
                f"'structured_outputs' with '{name}' is not supported.", param="structured_outputs"
            )
    param, compact = "structured_outputs", asked.disable_any_whitespace is True
    return [
        *_of_json(param, asked.schema_, compact=compact),
        *_of_json(param, _ANY_OBJECT if asked.json_object else None, compact=compact),
        *_of_regex(param, asked.regex),
        *_of_choice(param, asked.choice),
        *_of_grammar(param, asked.grammar),
    ]


def _of_json(
    param: str, schema: str | dict[str, Any] | None, *, compact: bool = False
) -> list[Constraint]:
    if schema is None or schema == "":
        return []
    value = _parse(schema, param) if isinstance(schema, str) else schema
    return [Constraint(param, "schema", lambda: json_schema_grammar(value, compact=compact), value)]


def _of_regex(param: str, pattern: str | None) -> list[Constraint]:
    return [Constraint(param, "regex", lambda: regex_grammar(pattern))] if pattern else []


def _of_choice(param: str, choices: list[str] | None) -> list[Constraint]:
    if choices is None:
        return []
    return [Constraint(param, "list of choices", lambda: choice_grammar(choices))]


def _of_grammar(param: str, text: str | None) -> list[Constraint]:
    return [Constraint(param, "grammar", lambda: any_grammar(text))] if text else []


def _parse(text: str, param: str) -> Any:
    check_depth(text, param)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"'{param}' is not valid JSON: {error}.", param=param) from error
    check_text(value, param)
    return value
