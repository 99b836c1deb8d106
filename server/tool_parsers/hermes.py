"""Hermes, Qwen 2.5 and 3, and the generic format that our own prompt teaches other models.

```
<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call>
```
Each call has its own pair of tags. A closing tag that is missing is not missed. In the generic
format nothing stands between calls: a small model that is offered a line break there takes it, and
never comes to an end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from server.tool_parsers.buffer import TextBuffer
from server.tool_parsers.family import CallSyntax, Literal, Reading, ToolFamily
from server.tool_parsers.json_calls import read_json_call
from server.tool_parsers.lark import json_call
from server.tools import Functions, FunctionTool

BEGIN = "<tool_call>"
END = "</tool_call>"


def read_calls(buffer: TextBuffer, start: int, functions: Functions) -> Reading:
    yield from read_json_call(buffer, start + len(BEGIN), functions)
    yield from buffer.skip(END)


def _call(function: FunctionTool, literal: Literal) -> str:
    return json_call(function, literal, "arguments")


def _generic_syntax(control_tokens: Mapping[str, int]) -> CallSyntax:
    return CallSyntax(
        call=_call,
        trigger=BEGIN,
        open="\n",
        close=f"\n{END}",
        repeats_trigger=True,
    )


def _syntax(control_tokens: Mapping[str, int]) -> CallSyntax:
    return replace(_generic_syntax(control_tokens), between="\n")


FAMILY = ToolFamily(
    name="hermes",
    openings=(BEGIN,),
    read_calls=read_calls,
    syntax=_syntax,
    markers=(BEGIN, END),
)

GENERIC = replace(FAMILY, name="generic", syntax=_generic_syntax)
