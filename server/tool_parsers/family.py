"""What one family of models says about its tool calls: how to read them and how to write them.

A family is a value: markers, a generator that reads calls, and the syntax from which a grammar is
built. Adding a family is adding a module and a line in `registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from server.tool_parsers.buffer import TextBuffer
from server.tools import Functions, FunctionTool


@dataclass(frozen=True, slots=True)
class Text:
    """Content. It stood at `start` in the whole text that the parser was fed."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a function that was offered begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of the arguments of the call that began last."""

    text: str


ParserEvent = Text | CallStart | CallArguments
Reading = Generator[ParserEvent | None, None, None]
"""Events as they are found; None where more text is needed."""


class MalformedCall(Exception):
    """What looked like a call is none: it stays text."""


ReadCalls = Callable[[TextBuffer, int, Functions], Reading]
"""(buffer, place of the opening, offered functions). It takes nothing from the buffer before its
first event, and until then may raise MalformedCall; afterwards it takes whole calls only."""

Literal = Callable[[str], str]
"""A text as an expression of Lark that matches it, control tokens included."""

CallExpression = Callable[[FunctionTool, Literal], str]
"""The Lark expression of one call of a function."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How enforced calls are written.

    ```
    repeats_trigger:  trigger open call close [between trigger open call close]…
    otherwise:        trigger open call [between call]… close
    ```
    Without a `trigger` calls are the whole answer, and `ToolFamily.bare` is their first character.
    `rules` are further rules of Lark that the call expressions use.
    """

    call: CallExpression
    trigger: str = ""
    open: str = ""
    between: str = ""
    close: str = ""
    repeats_trigger: bool = False
    rules: str = ""


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """`openings` begin calls anywhere in an answer; the one character `bare` only at its start.

    `markers` may be control tokens of a model: they must not be skipped when text is made.
    `syntax` is told the model's control tokens, text → id. `template_call_id` makes of a call's id
    what the family's templates accept.
    """

    name: str
    openings: tuple[str, ...]
    read_calls: ReadCalls
    syntax: Callable[[Mapping[str, int]], CallSyntax]
    bare: str = ""
    markers: tuple[str, ...] = ()
    template_call_id: Callable[[str], str] = str
