from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from server.errors import InvalidRequest
from server.response_items import Item, chat_messages, read_items

CALL = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
USER = {"role": "user", "content": "1+1?"}
THOUGHT = {
    "type": "reasoning",
    "summary": [{"type": "summary_text", "text": "short"}],
    "content": [{"type": "reasoning_text", "text": "I must add."}],
}
CHAT_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}


def read(*items: Any) -> list[Item]:
    return read_items(list(items), [], lambda _: None)


def text(value: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": value}]


def test_every_kind_of_item_gets_the_form_in_which_it_is_listed() -> None:
    answer = {"role": "assistant", "content": "two"}
    items = read({"role": "developer", "content": "Add."}, USER, THOUGHT, CALL, OUTPUT, answer)
    for item in items:
        TypeAdapter(ResponseItem).validate_python(item)
    assert [item["id"].partition("_")[0] for item in items] == [
        "msg", "msg", "rs", "fc", "fco", "msg",
    ]  # fmt: skip
    assert items[1]["content"] == [{"type": "input_text", "text": "1+1?"}]
    assert items[-1]["content"][0]["type"] == "output_text"


def test_ids_that_the_client_gives_are_kept() -> None:
    assert read(USER | {"id": "msg_mine", "type": "message"})[0]["id"] == "msg_mine"


def test_a_string_is_one_message_of_the_user() -> None:
    items = read_items("hi", [], lambda _: None)
    assert chat_messages(None, items) == [{"role": "user", "content": text("hi")}]


def test_items_of_one_turn_of_the_assistant_are_one_message() -> None:
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Let me add."}]}
    messages = chat_messages("Be brief.", read(USER, THOUGHT, said, CALL, OUTPUT))
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": text("1+1?")},
        {
            "role": "assistant",
            "content": text("Let me add."),
            "tool_calls": [CHAT_CALL],
            "reasoning_content": "I must add.",
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]


def test_parallel_calls_are_one_message_with_content_null() -> None:
    second = CALL | {"call_id": "call_2"}
    message = chat_messages(None, read(USER, CALL, second))[1]
    assert message["content"] is None
    assert [call["id"] for call in message["tool_calls"]] == ["call_1", "call_2"]


def test_a_second_text_of_the_assistant_is_a_message_of_its_own() -> None:
    said = {"role": "assistant", "content": "a"}
    messages = chat_messages(None, read(USER, said, CALL, said))
    assert [m["role"] for m in messages] == ["user", "assistant", "assistant"]
    assert "tool_calls" not in messages[2]


def test_reasoning_without_text_says_nothing() -> None:
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "abc"}
    assert chat_messages(None, read(USER, hidden)) == [{"role": "user", "content": text("1+1?")}]


def test_an_output_in_parts_is_a_text_in_parts() -> None:
    parts = OUTPUT | {"output": [{"type": "input_text", "text": "2"}]}
    assert chat_messages(None, read(USER, CALL, parts))[2]["content"] == text("2")


def test_an_output_belongs_to_a_call_before_it() -> None:
    with pytest.raises(InvalidRequest, match="No tool call found .* call_1") as error:
        read(USER, OUTPUT)
    assert error.value.param == "input[1].call_id"
    earlier = read(USER, CALL)
    assert read_items([OUTPUT], earlier, lambda _: None)[0]["type"] == "function_call_output"


def test_a_reference_is_looked_up_with_and_without_its_type() -> None:
    known = read(USER)[0]
    found = read_items([{"type": "item_reference", "id": "a"}, {"id": "a"}], [], {"a": known}.get)
    assert found == [known, known]
    with pytest.raises(InvalidRequest, match="'b' not found"):
        read({"id": "b"})


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ("text", "input[0]"),
        ({"type": "computer_call"}, "input[0].type"),
        ({"type": 5}, "input[0].type"),
        ({"role": "tool", "content": "a"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": ["a"]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"role": "user", "content": "a", "id": 1}, "input[0].id"),
        (CALL | {"arguments": {}}, "input[0].arguments"),
        (CALL | {"name": "n" * 600}, "input[0].name"),
        ({"type": "function_call_output", "call_id": "a"}, "input[0].output"),
        ({"type": "reasoning", "summary": "a"}, "input[0].summary"),
        ({"type": "reasoning", "content": ["a"]}, "input[0].content[0].text"),
        (OUTPUT | {"output": [{"type": "input_image"}]}, "input[0].output[0].type"),
    ],
)
def test_a_wrong_item_is_named(item: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read(item)
    assert error.value.param == param
