from __future__ import annotations

from server.events import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from server.output_parser import OutputOptions, PlainOutput, merged, new_output_parser
from server.tools import FunctionTool
from tests.server.scripted_client import scored, scored_all

CALLS = OutputOptions(tool_parser="hermes", functions={"f": FunctionTool("f")})


def test_an_answer_with_neither_stage_goes_through_whole() -> None:
    output = new_output_parser(2, OutputOptions())
    assert isinstance(output, PlainOutput)
    entries = scored_all([1, 2])
    assert output.push("<tool_call>", entries, 2) == [TextDelta(2, "<tool_call>", entries)]
    assert output.push("", (), 1) == output.finish() == []


def test_an_entry_waits_with_the_text_of_its_token() -> None:
    output = new_output_parser(0, CALLS)
    assert output.push("a <", scored_all([1]), 1) == [TextDelta(0, "a")]
    assert output.push("b", scored_all([2]), 1) == [TextDelta(0, " <b", scored_all([1, 2]))]


def test_an_entry_of_a_call_is_dropped_and_one_of_content_around_it_is_kept() -> None:
    output = new_output_parser(0, CALLS)
    events = []
    for token, text in enumerate(["x", " <tool_call>", '{"name": "f"}', "</tool_call>y", "z"]):
        events += output.push(text, [scored(token, 1)], 1)
    events = merged([*events, *output.finish()])
    start = events[1]
    assert isinstance(start, ToolCallStart)
    assert events == [
        TextDelta(0, "x", scored_all([0])),
        ToolCallStart(0, 0, start.id, "f"),
        ToolCallArguments(0, 0, "{}"),
        TextDelta(0, "yz", scored_all([3, 4])),
    ]
    assert output.has_calls


def test_neighbours_of_one_kind_choice_and_call_are_joined() -> None:
    assert merged(
        [
            ReasoningDelta(0, "a"),
            ReasoningDelta(0, "b"),
            ReasoningDelta(1, "c"),
            ToolCallArguments(0, 0, "d"),
            ToolCallArguments(0, 0, "e"),
            ToolCallArguments(0, 1, "f"),
            TextDelta(0, "g", scored_all([1])),
            TextDelta(0, "h", scored_all([2])),
        ]
    ) == [
        ReasoningDelta(0, "ab"),
        ReasoningDelta(1, "c"),
        ToolCallArguments(0, 0, "de"),
        ToolCallArguments(0, 1, "f"),
        TextDelta(0, "gh", scored_all([1, 2])),
    ]
