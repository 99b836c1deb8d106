"""Answers timed by the chunk, with a clock that the script moves."""

from __future__ import annotations

import json

import httpx
import pytest

from server.bench.dialect import Dialect, StreamReader
from server.bench.errors import NotAvailable, RequestFailed, TargetLost
from server.bench.sse_frames import SseFrames
from server.bench.target import Target, TargetInfo
from server.bench.timing import Timing
from tests.server.bench.bench_rig import target_of
from tests.server.bench.scripted_server import ScriptedServer, run_virtual

PROMPT = tuple(range(100, 150))


def asked(server: ScriptedServer, num_new: int, leave_after: int | None = None) -> Timing:
    async def job() -> Timing:
        return await target_of(server).ask(PROMPT, num_new, leave_after=leave_after)

    return run_virtual(job)


def test_the_first_text_and_the_gaps_are_what_the_script_says() -> None:
    timing = asked(ScriptedServer(prefill_s=0.002, step_s=0.03), 4)
    assert timing.ttft_s == pytest.approx(50 * 0.002)
    assert timing.itl_s == pytest.approx((0.03, 0.03, 0.03))
    assert (timing.num_prompt_tokens, timing.num_completion_tokens) == (50, 4)


def test_chunks_of_several_tokens_are_counted_by_the_usage() -> None:
    timing = asked(ScriptedServer(step_s=0.03, tokens_per_chunk=3), 9)
    assert len(timing.arrivals_s) == 3
    assert timing.num_tokens == 9
    assert timing.tpot_s == pytest.approx(0.06 / 8)


def test_without_a_usage_what_came_is_counted() -> None:
    timing = asked(ScriptedServer(has_usage=False), 5)
    assert (timing.num_tokens, timing.num_completion_tokens) == (5, None)


def test_an_answer_that_is_left_ends_at_the_server_too() -> None:
    server = ScriptedServer()
    timing = asked(server, 50, leave_after=2)
    assert len(timing.arrivals_s) == 2
    assert (server.num_left, server.num_running) == (1, 0)


def test_a_lost_server_and_a_refusal_are_different_things() -> None:
    with pytest.raises(TargetLost, match="hexlm does not answer"):
        asked(ScriptedServer(fails_after=0), 1)
    with pytest.raises(RequestFailed, match="HTTP 400") as failed:
        asked(ScriptedServer(refuses=lambda body: True), 1)
    assert not isinstance(failed.value, TargetLost)


def test_a_connection_that_breaks_in_the_middle_is_a_failure() -> None:
    class Broken(httpx.AsyncByteStream):
        async def __aiter__(self):  # type: ignore[no-untyped-def]
            yield b'data: {"choices": [{"text": "a"}]}\n\n'
            raise httpx.ReadError("gone")

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Broken())

    async def job() -> Timing:
        transport = httpx.MockTransport(answer)
        client = httpx.AsyncClient(transport=transport, base_url="http://scripted")
        target = Target("peer", client, TargetInfo("small"), Dialect())
        return await target.ask(PROMPT, 2)

    with pytest.raises(RequestFailed, match="the connection broke: gone"):
        run_virtual(job)


def test_an_error_event_is_a_failure_with_its_message() -> None:
    with pytest.raises(RequestFailed, match="out of blocks"):
        StreamReader().take(b'{"error": {"message": "out of blocks"}}', 0.1)
    with pytest.raises(RequestFailed, match="not JSON"):
        StreamReader().take(b"{", 0.1)


def test_drafts_are_read_from_the_usage() -> None:
    reader = StreamReader()
    details = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 5}
    usage = {"completion_tokens": 9, "completion_tokens_details": details}
    reader.take(json.dumps({"choices": [{"text": "a"}]}).encode(), 0.1)
    reader.take(json.dumps({"usage": usage, "choices": []}).encode(), 0.2)
    timing = reader.timing(0.2)
    assert (timing.num_drafted_tokens, timing.num_accepted_tokens) == (8, 3)


def test_events_may_be_cut_anywhere() -> None:
    stream = b": a comment\r\n\r\ndata: {1}\r\n\r\nevent: x\ndata:{2}\n\n"
    for size in range(1, len(stream)):
        frames = SseFrames()
        pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert [data for piece in pieces for data in frames.feed(piece)] == [b"{1}", b"{2}"]


def test_memory_without_a_process_is_not_available() -> None:
    async def job() -> int:
        return target_of(ScriptedServer()).resident_bytes()

    with pytest.raises(NotAvailable, match="--pid"):
        run_virtual(job)
