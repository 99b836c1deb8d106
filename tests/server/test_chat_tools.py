"""Tools and reasoning over HTTP: what the scripted model says, and what a client then sees."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest
import tokenizers
from fastapi import FastAPI

from server.output_format import OutputFormat
from server.tokenizer import Tokenizer
from tests.server.byte_tokenizer import byte_tokenizer_json
from tests.server.http_client import HI, app_of, chat, content, error_of, events, listening
from tests.server.scripted_client import INFO, FakeEngine, saying

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "parameters": {
                "type": "object",
                "properties": {"tz": {"type": "string"}},
                "required": ["tz"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = '{"tz": "</tool_call> \\u00e9é\\n\\"😀", "o": {"a": [1.0, {}]}}'
CALL = f'<tool_call>\n{{"name": "get_time", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>{"name": "now"}</tool_call>'
THINKS = OutputFormat(reasons=True)
OPENS_THOUGHT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)


def engine(text: str, tokens_per_step: int = 1) -> FakeEngine:
    engine = FakeEngine(saying(text), tokens_per_step=tokens_per_step)
    engine.info = replace(INFO, max_model_len=4_096)
    return engine


def app_with(engine: FakeEngine, **model: Any) -> FastAPI:
    """With room for the tools' prompt, which takes a token per byte here."""
    return app_of(engine, max_model_len=4_096, **model)


def message_of(said: str, tokens_per_step: int = 1, **fields: Any) -> dict[str, Any]:
    """The message and the finish reason, which are checked to be the same streamed and whole."""
    model = {"output_format": fields.pop("output_format", OutputFormat())}
    if "template" in fields:
        model["template"] = fields.pop("template")
    fields = {"tools": TOOLS, **fields}
    whole = chat(app_with(engine(said, tokens_per_step), **model), **fields).json()["choices"][0]
    stream = events(chat(app_with(engine(said, tokens_per_step), **model), **fields, stream=True))
    assert without_ids(fold(stream)) == without_ids(whole)
    message: dict[str, Any] = whole["message"]
    return message | {"finish_reason": whole["finish_reason"]}


def fold(chunks: list[Any]) -> dict[str, Any]:
    """The choice that a stream's deltas add up to; the shape of each delta is checked."""
    message: dict[str, Any] = {"content": None, "refusal": None}
    calls: list[dict[str, Any]] = []
    reason = None
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content", "reasoning"):
                if delta.get(key):
                    message[key] = (message.get(key) or "") + delta[key]
            message |= {"role": delta["role"]} if "role" in delta else {}
            for piece in delta.get("tool_calls", ()):
                add_piece(calls, piece)
            reason = choice["finish_reason"] or reason
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    return {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}


def add_piece(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    assert isinstance(piece["index"], int)
    if piece["index"] == len(calls):
        assert piece.keys() == {"index", "id", "type", "function"}
        assert piece["function"]["arguments"] == ""
        calls.append({k: v for k, v in piece.items() if k != "index"})
        return
    assert piece["index"] == len(calls) - 1, "calls come one after another"
    assert piece.keys() == {"index", "function"}
    assert piece["function"].keys() == {"arguments"}
    calls[-1]["function"]["arguments"] += piece["function"]["arguments"]


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    calls = choice["message"].get("tool_calls", [])
    ids = [call.pop("id") for call in calls]
    assert len(set(ids)) == len(ids)
    assert all(call_id.startswith("call_") for call_id in ids)
    return choice


@pytest.mark.case("TO-03")
@pytest.mark.case("TO-05")
@pytest.mark.parametrize("tokens_per_step", [1, 3, 7, 500])
def test_calls_are_the_same_streamed_and_whole(tokens_per_step: int) -> None:
    message = message_of(f"Sure.\n{CALL}\n{NOW}", tokens_per_step)
    calls = [(c["type"], c["function"]) for c in message["tool_calls"]]
    assert calls == [
        ("function", {"name": "get_time", "arguments": ARGUMENTS}),
        ("function", {"name": "now", "arguments": "{}"}),
    ]
    assert (message["content"], message["finish_reason"]) == ("Sure.", "tool_calls")


def test_a_marker_that_is_a_control_token_is_read_and_enforced_as_one() -> None:
    extended = tokenizers.Tokenizer.from_str(byte_tokenizer_json())
    extended.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer = Tokenizer(extended.to_str())
    marker = tokenizer.control_tokens["[TOOL_CALLS]"]
    said = [*b"Ok. ", marker, *b'[{"name": "now", "arguments": {}}]']
    model = engine("")
    model.script = lambda request: said
    written = OutputFormat(tool_parser="mistral")
    app = app_with(model, tokenizer=tokenizer, output_format=written)
    message = chat(app, tools=TOOLS, tool_choice="required").json()["choices"][0]["message"]
    assert message["content"] == "Ok."
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert f"<[{marker}]>" in model.requests[0].grammar


def test_content_is_null_beside_calls_only() -> None:
    assert message_of(f"\n{CALL}\n")["content"] is None


@pytest.mark.case("TO-01")
def test_with_tool_choice_none_what_looks_like_a_call_is_text() -> None:
    message = message_of(CALL, tool_choice="none")
    assert (message["content"], message["finish_reason"]) == (CALL, "stop")
    assert "tool_calls" not in message


@pytest.mark.case("TO-01")
def test_with_tool_choice_none_the_prompt_has_no_tools() -> None:
    quiet, plain, loud = engine("x"), engine("x"), engine("x")
    chat(app_with(quiet), tools=TOOLS, tool_choice="none")
    chat(app_with(plain))
    chat(app_with(loud), tools=TOOLS)
    assert quiet.requests[0].prompt_token_ids == plain.requests[0].prompt_token_ids
    assert b"get_time" in bytes(i for i in loud.requests[0].prompt_token_ids if i < 256)


@pytest.mark.case("TO-02")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"tool_choice": {"type": "function", "function": {"name": "nope"}}},
            "tool_choice.function.name",
        ),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),  # beside tools
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_what_cannot_be_done_is_refused(fields: dict[str, Any], param: str, stream: bool) -> None:
    model = engine("x")
    answer = chat(app_with(model), **{"tools": TOOLS, "stream": stream, **fields})
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    assert model.requests == []


@pytest.mark.case("TO-02")
def test_what_must_be_called_is_in_the_grammar_and_auto_has_none() -> None:
    model = engine(CALL)
    app = app_with(model)
    named = {"type": "function", "function": {"name": "now"}}
    for choice in ("required", named, "auto", None):
        assert chat(app, tools=TOOLS, tool_choice=choice).status_code == 200
    required, one, *free = [request.grammar for request in model.requests]
    assert "get_time" in required and "now" in required
    assert "get_time" not in one and "now" in one
    assert free == ["", ""]


def test_a_schema_that_cannot_be_enforced_is_refused_only_where_it_has_to_be() -> None:
    parameters = {"type": "object", "properties": {"a": {"$ref": "http://x/y.json"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer = chat(app_with(engine("x")), tools=tools, tool_choice="required")
    assert answer.status_code == 400
    assert str(error_of(answer)["param"]).startswith("tools")
    assert chat(app_with(engine("x")), tools=tools).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_length_wins_over_tool_calls(stream: bool) -> None:
    answer = chat(app_with(engine(CALL)), tools=TOOLS, max_tokens=60, stream=stream)
    choice = fold(events(answer)) if stream else answer.json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length"
    assert ARGUMENTS.startswith(call["function"]["arguments"])
    assert call["function"]["arguments"] != ARGUMENTS


def test_every_choice_has_calls_of_its_own() -> None:
    answer = chat(app_with(engine(CALL + NOW)), tools=TOOLS, n=2).json()
    ids = [c["id"] for choice in answer["choices"] for c in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4


def test_usage_counts_the_markup_too() -> None:
    usage = chat(app_with(engine(CALL)), tools=TOOLS).json()["usage"]
    assert usage["completion_tokens"] == len(CALL.encode()) + 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens_per_step", [1, 5, 200])
def test_logprobs_are_those_of_the_content(stream: bool, tokens_per_step: int) -> None:
    said = f"<think>hm</think>Sure é.\n{CALL}\nDone"
    app = app_with(engine(said, tokens_per_step), output_format=THINKS)
    answer = chat(app, tools=TOOLS, logprobs=True, stream=stream)
    if stream:
        choices = [c for chunk in events(answer)[:-1] for c in chunk["choices"]]
        entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
        shown = content(events(answer))
    else:
        (choice,) = answer.json()["choices"]
        entries, shown = choice["logprobs"]["content"], choice["message"]["content"]
    assert shown == "Sure é.\nDone"
    assert bytes(b for entry in entries for b in entry["bytes"]) == shown.encode()


@pytest.mark.case("TO-03")
def test_the_openai_clients_stream_helper_accumulates_calls() -> None:
    with (
        listening(app_with(engine(f"Ok. {CALL}{NOW}"))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client,
        client.chat.completions.stream(
            model="fake/model",
            messages=HI,  # type: ignore[arg-type]
            tools=TOOLS,  # type: ignore[arg-type]
        ) as stream,
    ):
        done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [(e.name, e.arguments) for e in done] == [("get_time", ARGUMENTS), ("now", "{}")]
    assert [c.function.name for c in final.message.tool_calls or []] == ["get_time", "now"]
    assert (final.message.content, final.finish_reason) == ("Ok.", "tool_calls")


@pytest.mark.case("TO-07")
@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "tool", "tool_call_id": 3, "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "tool", "tool_call_id": "a", "content": {}}], "messages[0].content"),
        ([{"role": "tool", "tool_call_id": "a", "content": 3}], "messages[0].content"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "a b"}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "x" * 65}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
    ],
)
def test_wrong_types_and_names_in_the_history_are_refused_by_place(
    messages: list[Any], param: str
) -> None:
    answer = chat(app_with(engine("x")), messages=messages, tools=TOOLS)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


def test_a_thought_is_split_off_and_named_twice() -> None:
    message = message_of("<think>\nhm é\n</think>\n\nyes", output_format=THINKS)
    assert message["reasoning_content"] == message["reasoning"] == "hm é"
    assert (message["content"], message["finish_reason"]) == ("yes", "stop")


def test_a_model_without_reasoning_keeps_its_tags() -> None:
    assert message_of("<think>a</think>b")["content"] == "<think>a</think>b"


def test_a_template_that_opens_the_thought_starts_inside_it() -> None:
    message = message_of("hm</think>yes", output_format=THINKS, template=OPENS_THOUGHT)
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")


@pytest.mark.parametrize(
    "off",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ],
)
def test_thinking_can_be_switched_off(off: dict[str, Any]) -> None:
    model = engine("yes")
    app = app_with(model, output_format=THINKS, template=OPENS_THOUGHT)
    message = chat(app, **off).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "yes", "refusal": None}
    assert bytes(model.requests[0].prompt_token_ids).endswith(b"<think>\n\n</think>\n\n")


def test_a_call_after_a_thought_is_a_call_and_in_a_thought_is_none() -> None:
    message = message_of(f"<think>{CALL}</think>{NOW}", output_format=THINKS)
    assert message["reasoning_content"] == CALL
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["now"]


def test_reasoning_can_be_left_out() -> None:
    app = app_with(engine("<think>hm</think>yes"), output_format=THINKS)
    answer = chat(app, include_reasoning=False).json()
    assert "reasoning_content" not in answer["choices"][0]["message"]
    chunks = events(chat(app, include_reasoning=False, stream=True))
    assert "hm" not in json.dumps(chunks)


@pytest.mark.parametrize("tokens_per_step", [1, 4, 100])
def test_the_tokens_of_a_thought_are_counted(tokens_per_step: int) -> None:
    app = app_with(engine("<think>hm</think>yes", tokens_per_step), output_format=THINKS)
    usage = chat(app).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("<think>hm</think>")
    assert usage["completion_tokens"] == len("<think>hm</think>yes") + 1


OLD = [tool["function"] for tool in TOOLS]


@pytest.mark.parametrize("tokens_per_step", [1, 5])
def test_old_clients_get_calls_in_their_form(tokens_per_step: int) -> None:
    app = app_with(engine(CALL, tokens_per_step))
    (choice,) = chat(app, functions=OLD, function_call="auto").json()["choices"]
    call = {"name": "get_time", "arguments": ARGUMENTS}
    assert choice["finish_reason"] == "function_call"
    assert (choice["message"]["content"], choice["message"]["function_call"]) == (None, call)
    assert "tool_calls" not in choice["message"]
    chunks = events(chat(app, functions=OLD, stream=True))[:-1]
    deltas = [
        c["delta"]["function_call"]
        for x in chunks
        for c in x["choices"]
        if "function_call" in c["delta"]
    ]
    assert deltas[0] == {"name": "get_time", "arguments": ""}
    assert "".join(delta["arguments"] for delta in deltas) == ARGUMENTS
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"


def test_old_clients_get_text_as_ever() -> None:
    (choice,) = chat(app_with(engine("hello")), functions=OLD).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("hello", "stop")
    assert "function_call" not in choice["message"]


def test_a_function_that_old_clients_name_is_enforced_and_told() -> None:
    model = engine(CALL)
    chat(app_with(model), functions=OLD, function_call={"name": "get_time"})
    assert model.requests[0].grammar
    told = bytes(i for i in model.requests[0].prompt_token_ids if i < 256)
    assert b'"name": "get_time"' in told


def test_a_whole_conversation_of_an_old_client_is_understood() -> None:
    model = engine("It is noon.")
    messages = [
        *HI,
        {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "name": "now", "content": "12:00"},
    ]
    answer = chat(app_with(model), messages=messages, functions=OLD).json()
    assert answer["choices"][0]["message"]["content"] == "It is noon."
    assert b"12:00" in bytes(i for i in model.requests[0].prompt_token_ids if i < 256)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": OLD, "function_call": "required"}, "function_call"),
        ({"functions": OLD, "function_call": {"name": "nope"}}, "function_call.name"),
        ({"functions": [{"name": "f", "parameters": 3}]}, "functions[0].parameters"),
        ({"functions": [3]}, "functions[0]"),
        ({"functions": OLD, "tools": TOOLS}, "functions"),
    ],
    ids=str,
)
def test_errors_name_the_fields_of_old_clients(fields: dict[str, Any], param: str) -> None:
    error = error_of(chat(app_with(engine("a")), **fields))
    assert error["param"] == param
    assert "tool" not in error["message"] or "tools" in fields
