"""Requests to /v1/responses, and its events checked against the openai package's own models."""

from __future__ import annotations

import json
from typing import Any, get_args

import httpx
from fastapi import FastAPI
from openai.types.responses import Response, ResponseStreamEvent

from tests.server.http_client import app_of, post
from tests.server.scripted_client import FakeEngine, saying

_UNION = get_args(ResponseStreamEvent)[0]
_EVENT_MODELS = {
    get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(_UNION)
}


def respond(app: FastAPI, **fields: Any) -> httpx.Response:
    return post(app, "/v1/responses", {"input": "Say hello.", **fields})


def response_saying(said: str, **fields: Any) -> httpx.Response:
    return respond(app_of(FakeEngine(saying(said))), **fields)


def checked_response(value: dict[str, Any]) -> dict[str, Any]:
    """`value`, valid as the package's Response, lists and literals included."""
    Response.model_validate(value)
    return value


def checked_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`events`, each valid as the package's model of its type, numbered from 0."""
    for event in events:
        _EVENT_MODELS[event["type"]].model_validate(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def response_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The checked events of a stream."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return checked_events(parse_frames(response.text))


def parse_frames(text: str) -> list[dict[str, Any]]:
    """The events in frames that are checked to the byte."""
    frames = text.split("\n\n")
    assert frames.pop() == "", "the stream does not end in a blank line"
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def prompt_of(engine: FakeEngine) -> str:
    """The text of the newest prompt, control tokens left out."""
    ids = engine.requests[-1].prompt_token_ids
    return bytes(token_id for token_id in ids if token_id < 256).decode()
