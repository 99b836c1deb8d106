"""Chat templates as sandboxed programs with limits. Knows jinja2; not messages, not tokens.

A template comes out of a model file and is not trusted. It runs in jinja2's immutable sandbox, in
an environment that behaves as the one of `transformers` (trim_blocks, lstrip_blocks, loop
controls, `tojson` without HTML escaping, `raise_exception`, `strftime_now`, `generation` blocks).
Three limits hold beside it: every value that an operator, a call or a filter could blow up is
measured before it is made; the output is counted while it is generated; and the template's own
lines are counted and timed while they run, so that no loop outlives its budget.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from types import FrameType
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_OUTPUT_CHARS = 16 * 2**20
MAX_TEMPLATE_CHARS = 2**20
MAX_LINES = 5_000_000
MAX_RENDER_S = 5.0
MAX_NUMBER = 100_000
"""Largest integer a template may hand to a function: a width, a count, the end of a range."""

_FILE_NAME = "<chat template>"
_WIDE_FORMAT = re.compile(r"\d{5,}|\*")


class TemplateRefused(Exception):
    """The template raised, or broke a limit. The message is for the client."""


class ChatTemplate:
    """A compiled template. Rendering is safe in any thread; it may take up to MAX_RENDER_S."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateRefused(
                f"the chat template has more than {MAX_TEMPLATE_CHARS} characters"
            )
        try:
            environment = _Environment()
            variables = meta.find_undeclared_variables(environment.parse(source))
            code = environment.compile(source, filename=_FILE_NAME)
            self._template = environment.template_class.from_code(
                environment, code, environment.make_globals(None)
            )
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise TemplateRefused(f"the chat template is not valid: {error}") from error
        self.uses_tools = "tools" in variables
        """Whether the template itself tells a model of its tools."""

    def render(self, variables: Mapping[str, Any]) -> str:
        """The output of the template. Raises TemplateRefused, and nothing else."""
        pieces: list[str] = []
        size = 0
        try:
            with _LineBudget():
                for piece in self._template.generate(**variables):
                    size += len(piece)
                    if size > MAX_OUTPUT_CHARS:
                        raise TemplateRefused(f"output is over {MAX_OUTPUT_CHARS} characters")
                    pieces.append(piece)
        except TemplateRefused:
            raise
        except Exception as error:  # A template is foreign code: it may raise anything.
            raise TemplateRefused(f"{type(error).__name__}: {error}"[:500]) from error
        return "".join(pieces)


class _LineBudget:
    """Counts the lines of template code that this thread runs; raises when there are too many.

    A trace function is the only hook that also sees loops which print and call nothing. It is
    asked once per Python call and once per line of the template, not inside other functions.
    """

    def __enter__(self) -> None:
        self._num_lines = 0
        self._end_s = time.monotonic() + MAX_RENDER_S
        self._previous = sys.gettrace()
        sys.settrace(self._on_call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._previous)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        return self._on_line if frame.f_code.co_filename == _FILE_NAME else None

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        self._num_lines += 1
        if self._num_lines > MAX_LINES:
            raise TemplateRefused(f"the template ran more than {MAX_LINES} lines")
        if self._num_lines % 64 == 0 and time.monotonic() > self._end_s:
            raise TemplateRefused(f"the template ran longer than {MAX_RENDER_S:g} s")
        return self._on_line


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.filters["tojson"] = _to_json
        for name, function in list(self.filters.items()):
            self.filters[name] = _measured(function)
        self.filters["concatenate"] = _concatenate
        self.filters["join"] = _measured_join(self.filters["join"])
        self.filters["replace"] = _measured_replace(self.filters["replace"])
        self.filters["format"] = _measured_format(self.filters["format"])

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        return super()._generate(_MeasuredConcat().visit(source), name, filename, defer_init)

    def call(self, /, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        _check_numbers(args, kwargs)
        _check_text_method(function, args)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MeasuredConcat(NodeTransformer):
    """`a ~ b` becomes a filter, since jinja2 offers no other way to look at its operands."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        first, *rest = node.nodes
        call = nodes.Filter(first, "concatenate", rest, [], None, None, lineno=node.lineno)
        assert node.environment is not None
        call.set_environment(node.environment)
        return call


def _raise_exception(message: object) -> None:
    raise TemplateRefused(str(message)[:500])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _concatenate(*values: Any) -> str:
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _measured(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with its numbers checked first; keeps jinja2's marks on the function."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args, kwargs)
        return function(*args, **kwargs)

    return checked


def _measured_replace(replace: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(replace)
    def checked(context: Any, s: Any, old: Any, new: Any, count: int | None = None) -> Any:
        _check_replace(str(s), str(old), str(new))
        return replace(context, s, old, new, count)

    return checked


def _measured_format(form: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(form)
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_format(str(value))
        return form(value, *args, **kwargs)

    return checked


def _measured_join(join: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(join)
    def checked(context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        values = list(value)
        _check_size(sum(len(v) for v in values if isinstance(v, str)) + len(values) * len(str(d)))
        return join(context, values, d, attribute)

    return checked


def _check_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise TemplateRefused(f"the template used a number over {MAX_NUMBER} as an argument")


def _check_size(size: int) -> None:
    if size > MAX_OUTPUT_CHARS:
        raise TemplateRefused(f"the template built a value over {MAX_OUTPUT_CHARS} items")


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateRefused("the template used a very wide format")


def _check_replace(text: str, old: str, new: str) -> None:
    _check_size(len(text) + text.count(old) * len(new))


def _check_text_method(function: Any, args: tuple[Any, ...]) -> None:
    """`replace`, `join` and `translate` of a text can multiply sizes; `format` is checked apart."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    if not isinstance(owner, str):
        return
    if name == "replace" and len(args) >= 2:
        _check_replace(owner, str(args[0]), str(args[1]))
    elif name == "join" and args and isinstance(args[0], (list, tuple, str)):
        _check_size(sum(len(owner) + len(str(piece)) for piece in args[0]))
    elif name == "translate":
        raise TemplateRefused("the template used str.translate")


def _check_operator(operator: str, left: Any, right: Any) -> None:
    if operator == "**":
        _check_numbers((left, right), {})
        if isinstance(right, int) and right > 64:
            raise TemplateRefused("the template used a power over 64")
    elif operator == "*":
        for many, count in ((left, right), (right, left)):
            if isinstance(count, int) and hasattr(many, "__len__"):
                _check_size(len(many) * max(count, 0))
        if isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() + right.bit_length())
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check_size(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left)
