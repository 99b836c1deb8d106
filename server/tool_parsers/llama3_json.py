"""Llama 3.1 to 3.3: the answer is one JSON object per call and nothing else.

```
{"name": "get_weather", "parameters": {"city": "Oslo"}}; {"name": …}
```
`<|python_tag|>` may stand before it; there it opens calls anywhere. An object that is no call of
an offered function is an ordinary answer in JSON.
"""

from __future__ import annotations

from collections.abc import Mapping

from server.tool_parsers.buffer import TextBuffer
from server.tool_parsers.family import CallSyntax, Literal, MalformedCall, Reading, ToolFamily
from server.tool_parsers.json_calls import read_json_call
from server.tool_parsers.lark import json_call
from server.tools import Functions, FunctionTool

TAG = "<|python_tag|>"


def read_calls(buffer: TextBuffer, start: int, functions: Functions) -> Reading:
    if buffer.text.startswith(TAG, start):
        start += len(TAG)
    yield from read_json_call(buffer, start, functions)
    while True:
        start = yield from buffer.skip_space(0)
        if (yield from buffer.expects(start, ";")) is None:
            return
        try:
            yield from read_json_call(buffer, start + 1, functions)
        except MalformedCall:
            return


def _call(function: FunctionTool, literal: Literal) -> str:
    return json_call(function, literal, "parameters")


def _syntax(control_tokens: Mapping[str, int]) -> CallSyntax:
    return CallSyntax(call=_call, between="; ")


FAMILY = ToolFamily(
    name="llama3_json",
    openings=(TAG,),
    bare="{",
    read_calls=read_calls,
    syntax=_syntax,
    markers=(TAG,),
)
