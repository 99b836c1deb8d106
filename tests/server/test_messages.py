from typing import Any

import pytest

from server.errors import InvalidRequest
from server.messages import read_messages


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("hi", "messages"),
        ([], "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": 5}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "tool", "content": {}, "tool_call_id": "a"}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
def test_a_wrong_message_is_refused_with_its_place(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_messages(messages)
    assert caught.value.param == param


def arguments_of(text: Any) -> Any:
    call = {"function": {"name": "f", "arguments": text}}
    return read_messages([{"role": "assistant", "tool_calls": [call]}])[0]["tool_calls"][0][
        "function"
    ]["arguments"]


def test_missing_and_empty_arguments_are_an_empty_mapping() -> None:
    assert arguments_of(None) == arguments_of("") == arguments_of("{}") == {}


def test_arguments_that_are_no_object_stay_text() -> None:
    assert arguments_of('{"a": ') == '{"a": '
    assert arguments_of("[1]") == "[1]"


def test_arguments_nested_too_deeply_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="nested deeper"):
        arguments_of("[" * 100_000)


def test_a_lone_surrogate_inside_arguments_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        arguments_of('{"a": "\\ud83d"}')


def test_a_legacy_function_call_is_a_tool_call() -> None:
    message = {"role": "assistant", "content": None, "function_call": {"name": "f"}}
    assert read_messages([message])[0]["tool_calls"][0]["function"]["name"] == "f"


def test_both_names_of_a_thought_in_the_history_are_read() -> None:
    for key in ("reasoning", "reasoning_content"):
        (message,) = read_messages([{"role": "assistant", "content": "a", key: "hm"}])
        assert message["reasoning_content"] == "hm"
