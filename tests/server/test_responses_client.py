"""The openai client against /v1/responses, over a socket and a scripted engine."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest
from openai.types.responses import Response, ResponseCreatedEvent
from pydantic import BaseModel

from server.http_settings import HttpSettings
from tests.server.http_client import app_of, listening
from tests.server.scripted_client import FakeEngine, saying

MODEL = "fake/model"


@contextmanager
def client_of(engine: FakeEngine, settings: HttpSettings | None = None) -> Iterator[openai.OpenAI]:
    with (
        listening(app_of(engine, settings)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client


def ended(client: openai.OpenAI, response_id: str) -> Response:
    end_s = time.monotonic() + 3
    while (response := client.responses.retrieve(response_id)).status == "in_progress":
        assert time.monotonic() < end_s, "the response did not end in time"
        time.sleep(0.01)
    return response


def slow(text: str) -> FakeEngine:
    engine = FakeEngine(saying(text))
    engine.step_s = 0.02
    return engine


def test_create_retrieve_list_and_delete() -> None:
    with client_of(FakeEngine(saying("hello"))) as client:
        made = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16)
        assert (made.output_text, made.status) == ("hello", "completed")
        assert client.responses.retrieve(made.id) == made
        items = list(client.responses.input_items.list(made.id, limit=1))
        assert [item.type for item in items] == ["message"]
        client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            client.responses.retrieve(made.id)


def test_the_stream_helper_accumulates_the_text() -> None:
    with client_of(FakeEngine(saying("hello 😀"), tokens_per_step=2)) as client:
        with client.responses.stream(model=MODEL, input="Say hello.") as stream:
            snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert (snapshots[-1], final.output_text) == ("hello 😀", "hello 😀")
        assert client.responses.retrieve(final.id).output_text == "hello 😀"


def test_parsing_reads_the_text_as_the_model_that_was_given() -> None:
    class City(BaseModel):
        name: str

    with client_of(FakeEngine(saying('{"name": "Oslo"}'))) as client:
        made = client.responses.parse(model=MODEL, input="A city.", text_format=City)
    assert made.output_parsed == City(name="Oslo")


def test_a_background_response_is_retrieved_when_it_is_done() -> None:
    with client_of(slow("hello")) as client:
        made = client.responses.create(model=MODEL, input="Say hello.", background=True)
        assert (made.status, made.output) == ("in_progress", [])
        done = ended(client, made.id)
        assert (done.status, done.output_text, done.background) == ("completed", "hello", True)
        assert client.responses.cancel(made.id).status == "completed"


def test_a_cancelled_background_response_leaves_the_engine() -> None:
    engine = slow("x" * 400)
    with client_of(engine) as client:
        made = client.responses.create(model=MODEL, input="Go on.", background=True)
        assert len(engine.running) == 1
        with pytest.raises(openai.BadRequestError, match="still in progress"):
            client.responses.create(model=MODEL, input="a", previous_response_id=made.id)
        for _ in range(2):
            assert client.responses.cancel(made.id).status == "cancelled"
        assert (engine.running, len(engine.aborted)) == (set(), 1)


def test_deleting_a_background_response_cancels_it() -> None:
    engine = slow("x" * 400)
    with client_of(engine) as client:
        made = client.responses.create(model=MODEL, input="Go on.", background=True)
        client.responses.delete(made.id)
        assert engine.running == set()
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)


def test_a_background_response_that_fails_tells_why() -> None:
    engine = FakeEngine(saying("hello"))
    engine.fail_after = 1
    with client_of(engine) as client:
        made = client.responses.create(model=MODEL, input="Say hello.", background=True)
        done = ended(client, made.id)
    assert done.status == "failed"
    assert done.error is not None
    assert done.error.message == "the scripted error"


def test_background_responses_are_bounded() -> None:
    settings = HttpSettings(max_background_responses=1)
    with client_of(slow("x" * 400), settings) as client:
        made = client.responses.create(model=MODEL, input="Go on.", background=True)
        with pytest.raises(openai.RateLimitError, match="background"):
            client.responses.create(model=MODEL, input="Go on.", background=True)
        client.responses.cancel(made.id)
        again = client.responses.create(model=MODEL, input="Go on.", background=True)
        client.responses.cancel(again.id)


def test_a_background_stream_is_taken_up_again_where_it_was_left() -> None:
    with client_of(slow("hello world")) as client:
        stream = client.responses.create(
            model=MODEL, input="Say hello.", background=True, stream=True
        )
        seen = [event for event, _ in zip(stream, range(6), strict=False)]
        stream.close()
        assert isinstance(seen[0], ResponseCreatedEvent)
        response_id = seen[0].response.id
        rest = list(
            client.responses.retrieve(
                response_id, stream=True, starting_after=seen[-1].sequence_number
            )
        )
        events = [*seen, *rest]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == (
            "hello world"
        )
        last = events[-1]
        assert last.type == "response.completed"
        assert client.responses.retrieve(response_id) == last.response
        again = client.responses.retrieve(response_id, stream=True)
        assert [event.to_json() for event in again] == [event.to_json() for event in events]
        assert list(client.responses.retrieve(response_id, stream=True, starting_after=999)) == []


def test_leaving_a_background_stream_leaves_the_response_running() -> None:
    engine = slow("x" * 40)
    with client_of(engine) as client:
        with client.responses.create(
            model=MODEL, input="Go on.", background=True, stream=True
        ) as stream:
            first = next(iter(stream))
        assert isinstance(first, ResponseCreatedEvent)
        assert ended(client, first.response.id).output_text == "x" * 40
        assert engine.aborted == []


def test_a_cancelled_background_stream_ends_for_its_readers() -> None:
    with client_of(slow("x" * 400)) as client:
        stream = iter(
            client.responses.create(model=MODEL, input="Go on.", background=True, stream=True)
        )
        first = next(stream)
        assert isinstance(first, ResponseCreatedEvent)
        client.responses.cancel(first.response.id)
        last = list(stream)[-1]
        assert last.type == "response.incomplete"
        assert last.response.status == "cancelled"


def test_only_what_has_its_events_kept_can_be_streamed_again() -> None:
    with client_of(FakeEngine(saying("hello"))) as client:
        made = client.responses.create(model=MODEL, input="Say hello.")
        with pytest.raises(openai.BadRequestError, match="'background' and 'stream'"):
            client.responses.retrieve(made.id, stream=True)
        for fields in ({"starting_after": 3}, {"include_obfuscation": True}):
            with pytest.raises(openai.BadRequestError, match=next(iter(fields))):
                client.responses.retrieve(made.id, extra_query=fields)


def test_the_sdk_counts_input_tokens() -> None:
    with client_of(FakeEngine(saying("hello"))) as client:
        counted = client.responses.input_tokens.count(model=MODEL, input="Say hello.")
        made = client.responses.create(model=MODEL, input="Say hello.")
        assert made.usage is not None
        assert counted.input_tokens == made.usage.input_tokens
