"""GET /debug/trace: over a socket from a real engine process, its errors, and the file's format."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from engine.span import Category, Span, TracedStep
from scheduler.messages import EndTrace, Trace
from server.app import create_app
from server.engine_client import ClientPolicy, EngineClient
from server.errors import EngineUnavailable, TraceBusy
from server.http_settings import HttpSettings
from server.metrics import Metrics
from server.model_registry import ServedModels
from server.models import ModelManager
from server.trace_json import ordered_spans, trace_events, trace_json
from tests.server.embedder import embedder
from tests.server.engine_scripts import ThreadLauncher, silent_engine
from tests.server.http_client import app_of, error_of, listening, send
from tests.server.scripted_client import FakeEngine, saying, served
from tests.server.tiny_models import letters_launcher, loadable
from tests.traces import MS, assert_nested, span_in, team_times, traced_step

DEBUG = HttpSettings(debug=True)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a server with a real engine process whose steps take 5 ms."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        manager.load(loadable("letters", letters_launcher(step_s=0.005)))
        await manager.wait_settled()
        yield
        await manager.stop()

    manager = ModelManager(ClientPolicy(max_num_seqs=4, max_queue=16), Metrics())
    with listening(create_app(manager, DEBUG, lifespan=lifespan)) as url:
        yield url


def complete(url: str, num_tokens: int) -> str:
    body = {"prompt": "ab", "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=20)
    return str(answer.json()["choices"][0]["text"])


def get_trace(url: str, **parameters: Any) -> httpx.Response:
    return httpx.get(f"{url}/debug/trace", params=parameters, timeout=20)


def spans_of(document: dict[str, Any]) -> list[Span]:
    """As they would be drawn: a track is a thread of a process."""
    return [
        Span(
            e["name"], Category(e["cat"]), f"{e['pid']}/{e['tid']}", round(e["ts"] * 1000),
            round(e["ts"] * 1000) + round(e["dur"] * 1000), e["args"],
        )
        for e in document["traceEvents"]
        if e["ph"] == "X"
    ]  # fmt: skip


def test_real_steps_of_a_real_engine(server: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(get_trace, server, steps=6, model="letters")
        time.sleep(0.2)
        traced = complete(server, 10)
        document = answer.result().json()
    assert traced == complete(server, 10), "the output is the same with and without a trace"
    facts = document["otherData"]
    assert (facts["model"], facts["num_steps"], facts["num_steps_wanted"]) == ("letters", 6, 6)
    assert (facts["device"], facts["num_threads"]) == ("fake", 1)
    spans = spans_of(document)
    steps = [span for span in spans if span.category is Category.STEP]
    assert len(steps) == 6
    executed = [span for span in spans if span.category is Category.EXECUTE]
    assert all(span.end_ns - span.start_ns >= 4 * MS for span in executed)
    (waiting,) = [span for span in spans if span.category is Category.QUEUE]
    assert waiting.args["prompt_tokens"] == 2
    assert 0 <= waiting.end_ns - waiting.start_ns < 5_000 * MS, "one clock for both processes"
    assert_nested(spans)
    assert [span.start_ns for span in spans] == sorted(span.start_ns for span in spans)


def test_without_work_the_answer_has_no_steps_and_comes_in_time(server: str) -> None:
    began_s = time.monotonic()
    document = get_trace(server, steps=5, timeout=0.2).json()
    assert 0.2 <= time.monotonic() - began_s < 5
    assert document["otherData"]["num_steps"] == 0
    assert document["traceEvents"] == []


def test_a_second_trace_at_the_same_time_is_refused_and_the_first_goes_on(server: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(get_trace, server, timeout=1)
        time.sleep(0.3)
        second = get_trace(server)
        assert second.status_code == 409
        assert error_of(second)["code"] == "trace_busy"
        assert "letters is being recorded already" in error_of(second)["message"]
        assert first.result().status_code == 200
    assert get_trace(server, timeout=0.1).status_code == 200


def test_a_client_that_leaves_ends_its_trace(server: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(f"{server}/debug/trace", timeout=0.3)
    until_s = time.monotonic() + 5
    while (answer := get_trace(server, timeout=0.1)).status_code == 409:
        assert time.monotonic() < until_s, "the trace of nobody goes on"
        time.sleep(0.05)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("query", "param", "message"),
    [
        ("steps=0", "steps", "'steps' must be a whole number from 1 to 1,000, not '0'."),
        ("steps=1001", "steps", "not '1001'"),
        ("steps=-3", "steps", "not '-3'"),
        ("steps=1e2", "steps", "not '1e2'"),
        ("steps=", "steps", "not ''"),
        ("steps=" + "9" * 10_000, "steps", "from 1 to 1,000"),
        ("timeout=0", "timeout", "a number of seconds above 0 and up to 600, not '0'"),
        ("timeout=601", "timeout", "not '601'"),
        ("timeout=nan", "timeout", "not 'nan'"),
        ("timeout=soon", "timeout", "not 'soon'"),
    ],
)
def test_numbers_out_of_range_are_told(query: str, param: str, message: str) -> None:
    answer = send(app_of(FakeEngine(saying("a")), DEBUG), "GET", f"/debug/trace?{query}")
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param
    assert message in error_of(answer)["message"]


def test_models_that_cannot_be_traced_are_told() -> None:
    app = create_app(ServedModels(served(FakeEngine(saying("a"))), embedder()), DEBUG)
    unknown = send(app, "GET", "/debug/trace?model=nope")
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")
    other = send(app, "GET", f"/debug/trace?model={embedder().name}")
    assert (other.status_code, error_of(other)["code"]) == (400, "model_not_supported")


def test_it_is_off_by_default_and_says_how_to_turn_it_on() -> None:
    app = app_of(FakeEngine(saying("a")))
    answer = send(app, "GET", "/debug/trace?steps=3")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "debug_disabled"
    assert "--debug" in error_of(answer)["message"]


def test_it_asks_for_a_key_as_other_routes_do() -> None:
    app = app_of(FakeEngine(saying("a")), HttpSettings(debug=True, api_keys=("sk-a",)))
    assert send(app, "GET", "/debug/trace").status_code == 401
    key = {"authorization": "Bearer sk-a"}
    assert send(app, "GET", "/debug/trace", headers=key).status_code == 200


def test_an_engine_that_ends_fails_its_trace_and_the_next_engine_has_none() -> None:
    async def main() -> None:
        launcher = ThreadLauncher(silent_engine)
        client = EngineClient("tiny", launcher, ClientPolicy(1, 4))
        client.start()
        await client.wait_settled()
        tracing = asyncio.create_task(client.trace(3, 10.0))
        await asyncio.sleep(0.05)
        with pytest.raises(TraceBusy, match="trace of tiny"):
            await client.trace(1, 1.0)
        launcher.links[0][1].kill()
        with pytest.raises(EngineUnavailable, match="tiny ended while it was being traced"):
            await tracing
        await client.stop()
        assert launcher.sent(Trace) == [Trace(3)]

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_drain_ends_a_trace() -> None:
    async def main() -> None:
        launcher = ThreadLauncher(silent_engine)
        client = EngineClient("tiny", launcher, ClientPolicy(1, 4))
        client.start()
        await client.wait_settled()
        tracing = asyncio.create_task(client.trace(3, 10.0))
        await asyncio.sleep(0.01)
        await client.drain(0.1)
        await asyncio.sleep(0.05)
        assert launcher.sent(EndTrace) == [EndTrace()]
        with pytest.raises(EngineUnavailable, match="draining"):
            await client.trace(1, 1.0)
        await client.stop()
        with pytest.raises(EngineUnavailable, match="ended"):
            await tracing

    asyncio.run(asyncio.wait_for(main(), 10))


def document_of(*steps: TracedStep) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(b"".join(trace_json(steps, {"model": "m"})))
    return document


def test_the_file_names_its_tracks_and_begins_at_zero() -> None:
    segment = span_in(0, "segment 0", Category.SEGMENT, "lane npu", 2, 5, lane="npu", layer=0)
    document = document_of(traced_step(0, segment, prefill=8, wait_ms=3), traced_step(1))
    assert document["otherData"] == {"model": "m"}
    events = document["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert set(names.values()) == {"engine", "requests", "queue", "step loop", "lane npu"}
    complete = [e for e in events if e["ph"] == "X"]
    assert complete[0]["ts"] == 0 and complete[0]["cat"] == "queue"
    (found,) = [e for e in complete if e["name"] == "segment 0"]
    assert (found["ts"], found["dur"], found["args"]) == (5000, 3000, {"lane": "npu", "layer": 0})
    assert names[found["pid"], found["tid"]] == "lane npu"


def test_requests_that_wait_at_the_same_time_have_rows_of_their_own() -> None:
    spans = [
        Span("waiting", Category.QUEUE, "queue", start * MS, end * MS, {"request": name})
        for name, start, end in [("a", 0, 10), ("b", 5, 20), ("c", 10, 12), ("d", 11, 15)]
    ]
    events = list(trace_events([TracedStep(tuple(spans))]))
    rows = {e["args"]["request"]: e["tid"] for e in events if e["ph"] == "X"}
    assert rows["a"] == rows["c"]
    assert len({rows["b"], rows["c"], rows["d"]}) == 3


def test_stamps_of_threads_become_events_within_their_step() -> None:
    start_ns = traced_step(1).spans[0].start_ns + MS
    team = team_times(
        [0, 10, 20, 30, 40, 50, 60], [5, 10, 20, 25, 40, 60, 60],
        start_ns=start_ns, end_ns=start_ns + 8 * MS,
    )  # fmt: skip
    spans = list(ordered_spans([traced_step(0), TracedStep(traced_step(1).spans, (team,))]))
    assert {s.track for s in spans} == {"step loop", "cpu thread 0", "cpu thread 1"}
    assert_nested(spans)
    assert [span.start_ns for span in spans] == sorted(span.start_ns for span in spans)


def test_a_long_trace_comes_in_pieces() -> None:
    steps = [traced_step(number) for number in range(1000)]
    pieces = list(trace_json(steps, {}))
    assert len(pieces) > 5
    events = json.loads(b"".join(pieces))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 4000
