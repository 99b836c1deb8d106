"""Cases of structured output and tools on the small real model: a model without much wit shows
that it is the grammar that keeps the promise."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import openai
import pytest

from tests.cases.catalogue import body_of, catalogue, exchange
from tests.cases.real_server import CHAT, MODEL, NAMES, RealServer, text_of

pytestmark = pytest.mark.model


def body(case_id: str, **changes: Any) -> dict[str, Any]:
    return body_of(case_id, NAMES, **changes)


def schema_of(asked: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = asked["response_format"]["json_schema"]["schema"]
    return schema


def only_value(asked: dict[str, Any]) -> dict[str, str]:
    """What a schema with one property of one value allows."""
    ((name, values),) = schema_of(asked)["properties"].items()
    return {name: values["enum"][0]}


@pytest.mark.case("ST-01")
@pytest.mark.case("SO-11")
@pytest.mark.parametrize("case_id", ["ST-01", "TK-05", "SO-11", "PA-13"])
def test_a_schema_of_one_value_gives_that_value_both_ways(real: RealServer, case_id: str) -> None:
    asked = body(case_id, max_tokens=150)
    chunks = real.chunks(asked)
    whole = real.chat(asked)
    assert text_of(chunks) == whole["message"]["content"]
    assert json.loads(text_of(chunks)) == only_value(asked)
    assert whole["finish_reason"] == "stop"
    assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)


@pytest.mark.case("SO-11")
def test_a_schema_in_escapes_is_the_schema_in_utf_8(real: RealServer) -> None:
    asked = body("SO-11", max_tokens=80)
    answers = [
        real.http.post(CHAT, content=json.dumps(asked, ensure_ascii=escaped).encode()).json()
        for escaped in (True, False)
    ]
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1]


@pytest.mark.case("ST-02")
def test_a_forced_text_can_be_cut_anywhere(real: RealServer) -> None:
    asked = body("ST-02")
    whole = real.post(CHAT, asked | {"stream": False, "max_tokens": 60})
    num_tokens = whole["usage"]["completion_tokens"]
    for max_tokens in range(1, num_tokens - 1):
        cut = real.post(CHAT, asked | {"stream": False, "max_tokens": max_tokens})
        choice, text = cut["choices"][0], cut["choices"][0]["message"]["content"]
        assert choice["finish_reason"] == "length"
        assert cut["usage"]["completion_tokens"] == max_tokens
        assert whole["choices"][0]["message"]["content"].startswith(text.removesuffix("\ufffd"))
        assert text_of(real.chunks(asked | {"max_tokens": max_tokens})) == text


@pytest.mark.case("ST-04")
def test_a_stop_string_ends_a_forced_text(real: RealServer) -> None:
    asked = body("ST-04")
    whole = real.chat(asked)
    assert whole["message"]["content"].endswith('"alpha ')
    assert whole["finish_reason"] == "stop"
    assert text_of(real.chunks(asked)) == whole["message"]["content"]


@pytest.mark.case("PA-12")
@pytest.mark.case("PA-13")
@pytest.mark.parametrize("case_id", ["PA-12", "PA-13"])
def test_logprobs_under_a_mask_are_finite_and_carry_the_bytes(
    real: RealServer, case_id: str
) -> None:
    asked = body(case_id, max_tokens=80)
    choice = real.chat(asked)
    entries = choice["logprobs"]["content"]
    text = bytes(byte for entry in entries for byte in entry["bytes"]).decode()
    assert text == choice["message"]["content"]
    scores = [e["logprob"] for entry in entries for e in (entry, *entry["top_logprobs"])]
    assert all(-1e5 < score <= 0 for score in scores)


@pytest.mark.case("SO-01")
@pytest.mark.parametrize("keyword", ["$defs", "definitions"])
def test_an_enum_behind_a_reference_is_enforced_for_every_seed(
    real: RealServer, keyword: str
) -> None:
    asked = json.loads(json.dumps(body("SO-01")).replace("$defs", keyword))
    for seed in range(3):
        choice = real.chat(asked | {"seed": seed, "max_tokens": 200})
        assert choice["finish_reason"] == "stop"
        jsonschema_rs.validate(schema_of(asked), json.loads(choice["message"]["content"]))


@pytest.mark.case("SO-05")
def test_a_recursive_schema_gives_a_tree(real: RealServer) -> None:
    asked = json.loads(exchange(catalogue()["SO-05"], 0, NAMES).content)
    choice = real.chat(asked | {"max_tokens": 120, "temperature": 0})
    if choice["finish_reason"] == "stop":
        jsonschema_rs.validate(schema_of(asked), json.loads(choice["message"]["content"]))
    assert choice["message"]["content"].lstrip().startswith("{")


@pytest.mark.case("SO-07")
def test_a_document_that_is_cut_stays_as_it_is(real: RealServer) -> None:
    asked = body("SO-07", temperature=0)
    schema_of(asked)["properties"]["a"]["maxLength"] = 60
    whole = real.post(CHAT, asked | {"max_tokens": 300})
    cut = real.chat(asked)
    text = whole["choices"][0]["message"]["content"]
    assert cut["finish_reason"] == "length"
    assert text.startswith(cut["message"]["content"])
    assert cut["message"]["content"] != text
    exact = real.chat(asked | {"max_tokens": whole["usage"]["completion_tokens"]})
    assert (exact["message"]["content"], exact["finish_reason"]) == (text, "stop")


@pytest.mark.case("SO-10")
@pytest.mark.parametrize("index", range(len(catalogue()["SO-10"].variants)))
def test_bounds_hold_for_every_seed(real: RealServer, index: int) -> None:
    asked = json.loads(exchange(catalogue()["SO-10"], index, NAMES).content)
    for seed in range(3):
        choice = real.chat(asked | {"seed": seed, "max_tokens": 60})
        assert choice["finish_reason"] == "stop"
        jsonschema_rs.validate(schema_of(asked), json.loads(choice["message"]["content"]))


@pytest.mark.case("TO-01")
def test_no_call_comes_when_none_is_wanted(real: RealServer) -> None:
    asked = body("TO-01")
    choice = real.chat(asked)
    assert not choice["message"].get("tool_calls")
    assert choice["finish_reason"] in {"stop", "length"}
    deltas = [c["delta"] for chunk in real.chunks(asked) for c in chunk["choices"]]
    assert not any("tool_calls" in delta for delta in deltas)


def parameters_of(asked: dict[str, Any], name: str) -> dict[str, Any]:
    tools = {tool["function"]["name"]: tool["function"] for tool in asked["tools"]}
    parameters: dict[str, Any] = tools[name]["parameters"]
    return parameters


@pytest.mark.case("TO-02")
@pytest.mark.parametrize("choice", ["named", "required"])
def test_a_choice_of_tool_is_enforced_for_every_seed(real: RealServer, choice: str) -> None:
    asked = body("TO-02", max_tokens=100)
    asked["tool_choice"] = asked["tool_choice"] if choice == "named" else "required"
    for seed in range(3):
        answer = real.chat(asked | {"seed": seed})
        assert answer["finish_reason"] in {"tool_calls", "length"}
        calls = answer["message"]["tool_calls"]
        assert calls
        if answer["finish_reason"] == "tool_calls":
            for call in calls:
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                jsonschema_rs.validate(parameters_of(asked, name), json.loads(arguments))
                assert choice == "required" or name == "get_weather"


@pytest.mark.case("TO-03")
@pytest.mark.case("TO-05")
def test_deltas_of_a_call_begin_with_its_name_and_add_up(real: RealServer) -> None:
    asked = body("TO-03", temperature=0, max_tokens=120)
    chunks = real.chunks(asked)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [call for c in choices for call in c["delta"].get("tool_calls") or []]
    assert all(isinstance(delta["index"], int) for delta in deltas)
    firsts = [delta for delta in deltas if "id" in delta]
    assert [delta["index"] for delta in firsts] == list(range(len(firsts)))
    assert all(d["type"] == "function" and d["function"]["name"] for d in firsts)
    assert len({delta["id"] for delta in firsts}) == len(firsts) > 0
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["tool_calls"]
    whole = real.chat(asked)["message"]
    streamed = "".join(delta["function"].get("arguments") or "" for delta in deltas)
    assert streamed == "".join(call["function"]["arguments"] for call in whole["tool_calls"])
    assert whole["content"] is None
    assert text_of(chunks) == ""


@pytest.mark.case("TO-03")
def test_openais_client_gathers_a_streamed_call(real: RealServer) -> None:
    asked = body("TO-03", temperature=0, max_tokens=120)
    del asked["stream"], asked["model"]
    url = f"http://127.0.0.1:{real.port}/v1"
    with (
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        client.chat.completions.stream(model=MODEL, **asked) as stream,
    ):
        final = stream.get_final_completion()
    (call, *_) = final.choices[0].message.tool_calls or []
    assert isinstance(json.loads(call.function.arguments), dict)


FORCED_ARGUMENTS = [
    {"a": {"b": [1, {"c": None}]}},
    {"text": 'quote " back\\slash\nnewline 好 😀'},
    {"marker": "</tool_call> <|im_end|>"},
    {"n": 1.0},
    {},
]


@pytest.mark.case("TO-05")
@pytest.mark.parametrize("arguments", FORCED_ARGUMENTS, ids=lambda a: next(iter(a), "none"))
def test_forced_arguments_arrive_as_they_are(real: RealServer, arguments: dict[str, Any]) -> None:
    parameters: dict[str, Any] = {"type": "object", "additionalProperties": False}
    if arguments:
        properties = {name: {"enum": [value]} for name, value in arguments.items()}
        parameters |= {"properties": properties, "required": list(arguments)}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    asked = body("TO-03", tools=[tool], max_tokens=120, temperature=0)
    chunks = real.chunks(asked)
    deltas = [
        call
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls") or []
        if call["index"] == 0
    ]
    streamed = "".join(delta["function"].get("arguments") or "" for delta in deltas)
    whole = real.chat(asked)["message"]["tool_calls"][0]["function"]["arguments"]
    assert streamed == whole
    assert json.loads(whole) == arguments
