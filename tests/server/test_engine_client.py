"""The engine facade without deaths: admission, streams, aborts, statistics, Retry-After."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest

from scheduler.messages import Abort, FinishReason, GenerationRequest, StepOutput, StepStats
from server.engine_client import ClientPolicy, EngineClient
from server.engine_state import EngineState
from server.errors import EngineUnavailable, QueueFull
from server.finish_rate import FinishRate
from tests.server.engine_scripts import (
    INFO,
    Entry,
    ThreadLauncher,
    expected_tokens,
    failing_engine,
    loading_engine,
    request,
    scripted_engine,
    silent_engine,
)

POLICY = ClientPolicy(max_num_seqs=1, max_queue=4)


@asynccontextmanager
async def started(
    *entries: Entry, policy: ClientPolicy = POLICY
) -> AsyncIterator[tuple[EngineClient, ThreadLauncher]]:
    launcher = ThreadLauncher(*entries)
    client = EngineClient("tiny", launcher, policy)
    client.start()
    try:
        yield client, launcher
    finally:
        await client.stop()


def run_with(entry: Entry, test: Callable[[EngineClient, ThreadLauncher], Awaitable[None]]) -> None:
    async def main() -> None:
        async with started(entry) as (client, launcher):
            await client.wait_settled()
            await test(client, launcher)

    asyncio.run(asyncio.wait_for(main(), 10))


async def read(client: EngineClient, wanted: GenerationRequest) -> list[StepOutput]:
    return [output async for output in client.generate(wanted)]


def tokens(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def test_a_request_streams_its_tokens_and_ends_with_its_reason() -> None:
    async def check(client: EngineClient, launcher: ThreadLauncher) -> None:
        wanted = request("a", num_tokens=5, seed=3)
        outputs = await read(client, wanted)
        assert tokens(outputs) == expected_tokens(wanted)
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert client.num_unfinished == 0
        assert launcher.sent(Abort) == []

    run_with(scripted_engine, check)


def test_concurrent_requests_get_their_own_tokens() -> None:
    async def check(client: EngineClient, launcher: ThreadLauncher) -> None:
        wanted = [request(f"r{i}", num_tokens=6, seed=i) for i in range(4)]
        answers = await asyncio.gather(*(read(client, one) for one in wanted))
        assert [tokens(answer) for answer in answers] == [expected_tokens(one) for one in wanted]

    run_with(scripted_engine, check)


def test_a_ready_engine_shows_its_info_and_statistics() -> None:
    async def main() -> None:
        seen: list[StepStats] = []
        client = EngineClient("tiny", ThreadLauncher(scripted_engine), POLICY, seen.append)
        assert (client.state, client.info, client.stats) == (
            EngineState.LOADING,
            None,
            StepStats(),
        )
        client.start()
        await client.wait_settled()
        assert (client.state, client.state_detail, client.info) == (EngineState.READY, "", INFO)
        await read(client, request("a", num_tokens=3))
        assert client.stats.num_blocks == 64
        assert len(seen) == 3
        await client.stop()
        assert client.state is EngineState.DRAINING

    asyncio.run(asyncio.wait_for(main(), 10))


def test_blocks_are_known_before_the_first_step() -> None:
    async def check(client: EngineClient, launcher: ThreadLauncher) -> None:
        info = client.info
        assert info is not None and info.num_blocks > 0
        shown = (client.stats.num_blocks, client.stats.num_free_blocks)
        assert shown == (info.num_blocks, info.num_blocks)

    run_with(scripted_engine, check)


def test_the_queue_holds_exactly_seats_plus_queue_and_refuses_the_rest_with_numbers() -> None:
    async def check(client: EngineClient, launcher: ThreadLauncher) -> None:
        streams = [client.generate(request(f"r{i}")) for i in range(5)]
        for i in range(15):
            with pytest.raises(QueueFull) as caught:
                client.generate(request(f"x{i}"))
        assert "5 sequences are unfinished, 1 can run and 4 can wait" in caught.value.message
        assert int(caught.value.headers["retry-after"]) >= 1
        assert caught.value.type == "rate_limit_error"
        for stream in streams[2:]:
            await stream.aclose()
        for i in range(3):
            client.generate(request(f"again{i}"))
        with pytest.raises(QueueFull):
            client.generate(request("one too many"))

    run_with(silent_engine, check)


def test_what_goes_on_with_an_answer_is_let_in_when_full_and_while_draining() -> None:
    async def check(client: EngineClient, launcher: ThreadLauncher) -> None:
        for i in range(5):
            client.generate(request(f"r{i}"))
        resumed = replace(request("r0-answer"), resumed_token_ids=(1,))
        stream = client.generate(resumed)
        assert client.num_unfinished == 6
        with pytest.raises(QueueFull):
            client.generate(request("one too many"))
        await stream.aclose()
        drain = asyncio.create_task(client.drain(0.01))
        await asyncio.sleep(0)
        assert client.state is EngineState.DRAINING
        stream = client.generate(resumed)
        with pytest.raises(EngineUnavailable):
            client.generate(request("too late"))
        await drain
        assert (await anext(stream)).finish_reason is FinishReason.ERROR

    run_with(silent_engine, check)


def test_leaving_a_stream_before_its_first_output_aborts_it_exactly_once() -> None:
    async def check(client: EngineClient, launcher: ThreadLauncher) -> None:
        stream = client.generate(request("a"))
        await stream.aclose()
        await stream.aclose()
        assert [output async for output in stream] == []
        assert client.num_unfinished == 0
        await asyncio.sleep(0.05)
        assert launcher.sent(Abort) == [Abort("a")]

    run_with(silent_engine, check)


def test_cancelling_a_reader_aborts_its_request() -> None:
    async def check(client: EngineClient, launcher: ThreadLauncher) -> None:
        reader = asyncio.create_task(read(client, request("a")))
        await asyncio.sleep(0.05)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await asyncio.sleep(0.05)
        assert launcher.sent(Abort) == [Abort("a")]

    run_with(silent_engine, check)


def test_leaving_in_the_middle_drops_late_outputs_and_harms_nobody() -> None:
    async def check(client: EngineClient, launcher: ThreadLauncher) -> None:
        witness = request("witness", num_tokens=40, seed=1)
        reader = asyncio.create_task(read(client, witness))
        stream = client.generate(request("leaver", num_tokens=200))
        await anext(stream)
        await stream.aclose()
        assert tokens(await reader) == expected_tokens(witness)
        assert launcher.sent(Abort) == [Abort("leaver")]

    run_with(partial(scripted_engine, step_s=0.001), check)


def test_a_finished_stream_needs_no_abort() -> None:
    async def check(client: EngineClient, launcher: ThreadLauncher) -> None:
        stream = client.generate(request("a", num_tokens=2))
        outputs = [output async for output in stream]
        await stream.aclose()
        assert len(outputs) == 2
        assert launcher.sent(Abort) == []

    run_with(scripted_engine, check)


def test_requests_during_loading_are_refused_with_the_phase_and_retry_after() -> None:
    async def main() -> None:
        async with started(loading_engine) as (client, _):
            await asyncio.sleep(0.05)
            with pytest.raises(EngineUnavailable, match="loading: compiling the kernels") as caught:
                client.generate(request("a"))
            assert caught.value.headers["retry-after"] == "5"

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_load_failure_is_final_and_keeps_its_reason() -> None:
    async def check(client: EngineClient, launcher: ThreadLauncher) -> None:
        assert client.state is EngineState.FAILED
        assert client.state_detail == "the bundle is damaged; run `hexlm pull` again"
        with pytest.raises(EngineUnavailable, match="failed: the bundle is damaged"):
            client.generate(request("a"))
        await asyncio.sleep(0.05)
        assert len(launcher.links) == 1

    run_with(failing_engine, check)


def test_retry_after_follows_the_measured_rate() -> None:
    rate = FinishRate()
    assert rate.retry_after_s(1, 0.0) == 2.0
    for second in range(0, 50, 5):
        rate.record(float(second))
    assert rate.retry_after_s(1, 45.0) == pytest.approx(5.0)
    assert rate.retry_after_s(3, 45.0) == pytest.approx(15.0)
    assert rate.retry_after_s(1, 90.0) == pytest.approx(10.0)
    assert rate.retry_after_s(100, 45.0) == 120.0


def test_idle_time_does_not_make_the_rate_look_slow() -> None:
    rate = FinishRate()
    for second in (0.0, 5.0, 10.0):
        rate.record(second)
    rate.become_idle(10.0)
    rate.become_busy(3610.0)
    assert rate.retry_after_s(1, 3610.0) == pytest.approx(5.0)
