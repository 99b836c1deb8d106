from typing import Any

import pytest

from server.errors import QueueFull
from server.http_settings import HttpSettings
from tests.server.http_client import app_of, error_of, post, send
from tests.server.response_client import (
    checked_response,
    prompt_of,
    respond,
    response_events,
    response_saying,
)
from tests.server.scripted_client import FakeEngine, saying

TEXT = "好的 👩‍👩‍👧‍👦 naïve end"
MESSAGE_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL_TEMPLATE = (
    "{% if tools %}tools {{ tools | length }}\n{% endif %}{% for m in messages %}{{ m.role }}:"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{{ m.content }}\n"
    "{% endfor %}"
)


def text_of(response: dict[str, Any]) -> str:
    return str(response["output"][0]["content"][0]["text"])


def test_a_text_answer_is_a_valid_response() -> None:
    body = checked_response(response_saying(TEXT, metadata={"a": "b"}, user="u").json())
    assert (body["object"], body["status"]) == ("response", "completed")
    assert body["id"].startswith("resp_")
    item = body["output"][0]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert text_of(body) == TEXT
    assert (body["metadata"], body["user"], body["error"]) == ({"a": "b"}, "u", None)
    assert body["usage"]["total_tokens"] == (
        body["usage"]["input_tokens"] + body["usage"]["output_tokens"]
    )


def test_a_stream_is_the_whole_sequence_of_valid_events() -> None:
    app = app_of(FakeEngine(saying(TEXT), tokens_per_step=100))
    events = response_events(respond(app, stream=True))
    assert [event["type"] for event in events] == MESSAGE_EVENTS
    item_id = events[2]["item"]["id"]
    assert {e["item_id"] for e in events if "item_id" in e} == {item_id}
    assert {e["output_index"] for e in events if "output_index" in e} == {0}
    assert events[-1]["response"]["output"] == [events[-2]["item"]]


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_the_deltas_are_the_text(tokens_per_step: int) -> None:
    engine = FakeEngine(saying(TEXT), tokens_per_step=tokens_per_step, cached_tokens=16)
    events = response_events(respond(app_of(engine), stream=True))
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == TEXT == text_of(events[-1]["response"])
    assert events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 16


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_was_cut_is_incomplete(stream: bool) -> None:
    answer = response_saying("x" * 50, max_output_tokens=5, stream=stream)
    if stream:
        last = response_events(answer)[-1]
        assert last["type"] == "response.incomplete"
    body = last["response"] if stream else answer.json()
    assert (body["status"], text_of(body)) == ("incomplete", "xxxxx")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"
    assert body["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_without_text_still_has_a_message(stream: bool) -> None:
    answer = response_saying("", stream=stream)
    body = response_events(answer)[-1]["response"] if stream else answer.json()
    assert text_of(checked_response(body)) == ""


def test_instructions_come_first_and_are_not_carried_over() -> None:
    engine = FakeEngine(saying("pong"))
    app = app_of(engine)
    first = respond(app, input="ping", instructions="Be brief.").json()
    assert prompt_of(engine) == "system\nBe brief.\nuser\nping\nassistant\n"
    respond(app, input="again", previous_response_id=first["id"])
    assert prompt_of(engine) == "user\nping\nassistant\npong\nuser\nagain\nassistant\n"


def test_a_chain_of_responses_is_one_conversation() -> None:
    engine = FakeEngine(saying("b"))
    app = app_of(engine)
    last = respond(app, input="a").json()
    for text in ("c", "d"):
        last = respond(app, input=text, previous_response_id=last["id"]).json()
    assert prompt_of(engine).count("assistant\nb") == 2
    assert last["previous_response_id"].startswith("resp_")
    items = send(app, "GET", f"/v1/responses/{last['id']}/input_items?order=asc").json()
    roles = [item["role"] for item in items["data"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]


def test_a_streamed_response_can_be_retrieved_and_deleted() -> None:
    app = app_of(FakeEngine(saying("hello")))
    made = response_events(respond(app, stream=True))[-1]["response"]
    path = f"/v1/responses/{made['id']}"
    assert send(app, "GET", path).json() == made
    deleted = send(app, "DELETE", path).json()
    assert deleted == {"id": made["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        gone = send(app, method, path)
        assert (gone.status_code, error_of(gone)["code"]) == (404, "response_not_found")


def test_store_false_keeps_nothing() -> None:
    app = app_of(FakeEngine(saying("hello")))
    made = respond(app, store=False).json()
    assert send(app, "GET", f"/v1/responses/{made['id']}").status_code == 404


def test_an_unknown_previous_response_is_named() -> None:
    answer = response_saying("a", previous_response_id="resp_nope")
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (400, "previous_response_not_found")
    assert error["param"] == "previous_response_id"


def test_responses_of_another_key_do_not_exist() -> None:
    app = app_of(FakeEngine(saying("secret")), HttpSettings(api_keys=("one", "two")))
    mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    made = send(app, "POST", "/v1/responses", json={"input": "a"}, headers=mine).json()
    path = f"/v1/responses/{made['id']}"
    assert send(app, "GET", path, headers=mine).status_code == 200
    for method, suffix in (
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/cancel"),
        ("GET", "/input_items"),
    ):
        assert send(app, method, path + suffix, headers=other).status_code == 404
    body = {"input": "b", "previous_response_id": made["id"]}
    refused = send(app, "POST", "/v1/responses", json=body, headers=other)
    assert error_of(refused)["code"] == "previous_response_not_found"
    reference = {"input": [{"type": "item_reference", "id": made["output"][0]["id"]}]}
    refused = send(app, "POST", "/v1/responses", json=reference, headers=other)
    assert refused.status_code == 400
    assert send(app, "GET", path, headers=mine).json() == made


def test_an_item_reference_stands_for_the_item() -> None:
    engine = FakeEngine(saying("pong"))
    app = app_of(engine)
    item_id = respond(app).json()["output"][0]["id"]
    items = [
        {"role": "user", "content": "ping"},
        {"type": "item_reference", "id": item_id},
        {"role": "user", "content": "again"},
    ]
    assert respond(app, input=items).status_code == 200
    assert prompt_of(engine) == "user\nping\nassistant\npong\nuser\nagain\nassistant\n"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0].type"),
        ({"include": ["web_search_call.results"]}, "include[0]"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "oldest"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
        ({"input": "x" * 600}, "input"),
        ({"temperature": 3.0}, "temperature"),
        ({"top_k": "many"}, "top_k"),
        ({"service_tier": "gold"}, "service_tier"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_a_400_that_names_it(fields: dict[str, Any], param: str) -> None:
    answer = response_saying("a", **fields)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


def test_the_extensions_of_chat_mean_the_same() -> None:
    engine = FakeEngine(saying("a"))
    fields = {"top_k": 3, "seed": 7, "temperature": 0.5, "top_p": 0.9, "min_p": 0.1}
    assert respond(app_of(engine), **fields, max_tokens=1, n=3, unknown="x").status_code == 200
    assert len(engine.requests) == 1
    sampling = engine.requests[0].sampling
    assert (sampling.top_k, sampling.seed, sampling.temperature) == (3, 7, 0.5)
    assert (sampling.top_p, sampling.min_p) == (0.9, 0.1)
    assert sampling.max_tokens > 1


@pytest.mark.parametrize(
    "fields", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}]
)
def test_logprobs_come_with_every_delta_and_with_the_text(fields: dict[str, Any]) -> None:
    app = app_of(FakeEngine(saying("ab")))
    part = respond(app, **fields).json()["output"][0]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["a", "b"]
    assert len(part["logprobs"][0]["top_logprobs"]) == fields.get("top_logprobs", 0)
    events = response_events(respond(app, stream=True, **fields))
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
    checked_response(events[-1]["response"])


def test_an_engine_that_fails_ends_the_stream_with_response_failed() -> None:
    engine = FakeEngine(saying("hello"))
    engine.fail_after = 2
    app = app_of(engine)
    last = response_events(respond(app, stream=True))[-1]
    assert last["type"] == "response.failed"
    error = last["response"]["error"]
    assert (error["code"], error["message"]) == ("server_error", "the scripted error")
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert send(app, "GET", f"/v1/responses/{last['response']['id']}").json()["status"] == "failed"


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_is_an_http_error_also_for_a_stream(stream: bool) -> None:
    engine = FakeEngine(saying("a"))
    engine.refusal = QueueFull("busy", 2)
    answer = respond(app_of(engine), stream=stream)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")


def test_input_items_come_in_pages() -> None:
    app = app_of(FakeEngine(saying("a")))
    texts = [{"role": "user", "content": f"{i}"} for i in range(5)]
    path = f"/v1/responses/{respond(app, input=texts).json()['id']}/input_items"
    first = send(app, "GET", f"{path}?limit=2").json()
    assert [item["content"][0]["text"] for item in first["data"]] == ["4", "3"]
    assert first["has_more"] is True
    rest = send(app, "GET", f"{path}?limit=3&after={first['last_id']}").json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"]
    assert (rest["has_more"], rest["last_id"]) == (False, rest["data"][-1]["id"])
    assert error_of(send(app, "GET", f"{path}?after=msg_x"))["param"] == "after"
    assert send(app, "GET", f"{path}?limit=0").status_code == 400


def test_only_what_was_made_in_the_background_can_be_cancelled() -> None:
    app = app_of(FakeEngine(saying("a")))
    made = respond(app).json()
    refused = send(app, "POST", f"/v1/responses/{made['id']}/cancel")
    assert refused.status_code == 400
    assert "background" in error_of(refused)["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_is_an_item_and_its_output_goes_on(stream: bool) -> None:
    engine = FakeEngine(saying(CALL), tokens_per_step=3)
    app = app_of(engine, template=TOOL_TEMPLATE)
    answer = respond(app, input="1+1?", tools=[ADD], stream=stream)
    body = response_events(answer)[-1]["response"] if stream else answer.json()
    [call] = checked_response(body)["output"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "add", '{"a": 1}')
    engine.script = saying("two")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
    last = respond(app, input=[output], tools=[ADD], previous_response_id=body["id"]).json()
    assert text_of(last) == "two"
    assert "assistant:add\ntool:2\n" in prompt_of(engine)


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "add"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "add"}],
        },
    ],
)
def test_a_call_that_must_be_made_is_enforced_by_a_grammar(choice: Any) -> None:
    engine = FakeEngine(saying(CALL))
    body = respond(app_of(engine), tools=[ADD], tool_choice=choice).json()
    assert checked_response(body)["tool_choice"] == choice
    assert "add" in engine.requests[0].grammar


def test_allowed_tools_hide_the_others() -> None:
    engine = FakeEngine(saying("a"))
    app = app_of(engine, template=TOOL_TEMPLATE)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "add"}]}
    respond(app, tools=[ADD, ADD | {"name": "sub"}], tool_choice=allowed)
    assert prompt_of(engine).startswith("tools 1\n")


def test_a_schema_is_enforced_and_echoed() -> None:
    engine = FakeEngine(saying("{}"))
    text = {"format": {"type": "json_schema", "name": "city", "schema": {"type": "object"}}}
    body = checked_response(respond(app_of(engine), text=text).json())
    assert body["text"]["format"] == text["format"]
    assert "json_schema" in engine.requests[0].grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ],
)
def test_errors_of_chat_name_the_fields_of_responses(fields: dict[str, Any], param: str) -> None:
    error = error_of(response_saying("a", **fields))
    assert str(error["param"]).startswith(param)
    assert not {"response_format", "function.name", "reasoning_effort"} & set(
        error["message"].split("'")
    )


def turn(number: int) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": f"question {number} " + "x" * 60},
        {"role": "assistant", "content": f"answer {number}"},
    ]


def fitted(items: list[dict[str, Any]], **fields: Any) -> tuple[Any, str]:
    engine = FakeEngine(saying("a"))
    response = respond(app_of(engine), input=items, truncation="auto", **fields)
    return response, prompt_of(engine) if response.status_code == 200 else ""


@pytest.mark.parametrize("num_turns", [1, 2, 5, 6, 30])
def test_the_oldest_turns_give_way_to_a_conversation_that_is_too_long(num_turns: int) -> None:
    rules = {"role": "developer", "content": "the rules"}
    turns = [item for number in range(num_turns) for item in turn(number)]
    response, prompt = fitted([rules, *turns, *turn(99)[:1]], max_output_tokens=40)
    body = checked_response(response.json())
    assert (body["truncation"], body["usage"]["input_tokens"] <= 512 - 40) == ("auto", True)
    kept = [n for n in range(num_turns) if f"question {n} " in prompt]
    assert kept == list(range(num_turns - len(kept), num_turns))
    assert len(kept) == min(num_turns, 3), "as many as have room"
    assert [n for n in range(num_turns) if f"answer {n}<" in prompt.replace("\n", "<")] == kept
    assert "the rules" in prompt and "question 99" in prompt


def test_no_output_stays_without_its_call() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "y" * 300}
    items = [*turn(0)[:1], call, output, *turn(1)[:1]]
    _, prompt = fitted(items, tools=[ADD])
    assert "question 1" in prompt
    assert "yyy" not in prompt and "question 0" not in prompt


@pytest.mark.parametrize(("length", "status"), [(420, 200), (600, 400)])
def test_the_newest_turn_is_never_cut(length: int, status: int) -> None:
    response, prompt = fitted([*turn(0), {"role": "user", "content": "z" * length}])
    assert response.status_code == status
    assert prompt.count("z") == (length if status == 200 else 0)
    if status == 400:
        assert error_of(response)["code"] == "context_length_exceeded"


def test_everything_is_kept_for_the_next_turn() -> None:
    app = app_of(FakeEngine(saying("a")))
    turns = [item for number in range(9) for item in turn(number)]
    made = respond(app, input=turns, truncation="auto").json()
    items = send(app, "GET", f"/v1/responses/{made['id']}/input_items?limit=50").json()
    assert len(items["data"]) == 18


def test_without_truncation_a_long_conversation_is_refused() -> None:
    turns = [item for number in range(9) for item in turn(number)]
    response = respond(app_of(FakeEngine(saying("a"))), input=turns)
    assert error_of(response)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("text", ["Say hello.", "x" * 900])
def test_input_tokens_are_counted_as_they_are_used_whether_they_fit_or_not(text: str) -> None:
    app = app_of(FakeEngine(saying("a")))
    fields = {"input": text, "instructions": "Be brief.", "tools": [ADD]}
    counted = post(app, "/v1/responses/input_tokens", fields).json()
    assert counted.keys() == {"object", "input_tokens"}
    assert counted["object"] == "response.input_tokens"
    if len(text) < 100:
        assert counted["input_tokens"] == respond(app, **fields).json()["usage"]["input_tokens"]
    else:
        assert counted["input_tokens"] > 900
    refused = post(app, "/v1/responses/input_tokens", {"input": 3})
    assert error_of(refused)["param"] == "input"


def test_what_carries_thoughts_on_may_be_included() -> None:
    fields = {"include": ["reasoning.encrypted_content"], "store": False}
    checked_response(response_saying("a", **fields).json())
