"""Engine death, stall and crash loops: what resumes, what fails, and what is told meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.logprobs import TokenLogprobs
from engine.sampling_params import SamplingParams
from scheduler.messages import FinishReason, GenerationRequest, StepOutput
from server.engine_client import ClientPolicy, EngineClient
from server.engine_process import SpawnLauncher, describe_exit
from server.engine_state import EngineState
from server.errors import EngineUnavailable
from server.live_request import LiveRequest
from server.restart_budget import RestartBudget
from server.supervisor import SupervisionPolicy
from tests import fakes
from tests.server.engine_scripts import (
    ThreadLauncher,
    crashing_engine,
    expected_tokens,
    loading_engine,
    request,
    scripted_engine,
    silent_engine,
)
from tests.server.fake_engine import run_fake_engine

POLICY = ClientPolicy(4, 16, supervision=SupervisionPolicy(stall_timeout_s=30.0))

Test = Callable[[EngineClient], Awaitable[None]]


def run_with(launcher: Any, test: Test, policy: ClientPolicy = POLICY) -> None:
    async def main() -> None:
        client = EngineClient("tiny", launcher, policy)
        client.start()
        try:
            await client.wait_settled()
            await test(client)
        finally:
            await client.stop()

    asyncio.run(asyncio.wait_for(main(), 25))


async def read(client: EngineClient, wanted: GenerationRequest) -> list[StepOutput]:
    return [output async for output in client.generate(wanted)]


def tokens(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_streams_of_a_killed_engine_process_continue_with_the_same_tokens() -> None:
    async def check(client: EngineClient) -> None:
        wanted = [request(f"r{i}", num_tokens=60, seed=i) for i in range(3)]
        readers = [asyncio.create_task(read(client, one)) for one in wanted]
        await until(lambda: client.stats.num_running == 3)
        await asyncio.sleep(0.1)
        first_pid = client.pid
        psutil.Process(first_pid).kill()
        await until(lambda: client.state is EngineState.RESTARTING)
        with pytest.raises(EngineUnavailable, match="restarting"):
            client.generate(request("new"))
        answers = await asyncio.gather(*readers)
        assert [tokens(answer) for answer in answers] == [expected_tokens(one) for one in wanted]
        assert client.state is EngineState.READY
        assert client.pid != first_pid
        # One number of cached tokens per request, though the new engine counts differently.
        assert {output.num_cached_tokens for answer in answers for output in answer} == {0}

    run_with(SpawnLauncher(partial(scripted_engine, step_s=0.01), "tiny"), check)


def test_greedy_and_seeded_streams_of_the_real_loop_survive_two_kills_unchanged() -> None:
    async def check(client: EngineClient) -> None:
        wanted = [fakes.make_request(f"greedy{i}", (1, 2, i), max_tokens=50) for i in range(2)]
        seeded = SamplingParams(max_tokens=50, temperature=1.0, seed=11)
        wanted.append(fakes.make_request("seeded", (9, 8), sampling=seeded))
        readers = [asyncio.create_task(read(client, one)) for one in wanted]
        for _ in range(2):
            await until(lambda: client.stats.num_running == 3)
            await asyncio.sleep(0.1)
            psutil.Process(client.pid).kill()
            await until(lambda: client.state is not EngineState.READY)
        answers = [tokens(answer) for answer in await asyncio.gather(*readers)]
        assert answers == [fakes.expected_tokens(one, 2048)[0] for one in wanted]

    run_with(SpawnLauncher(partial(run_fake_engine, step_s=0.01), "tiny"), check)


def test_a_stopped_engine_process_leaves_no_process_behind() -> None:
    pids: list[int] = []

    async def check(client: EngineClient) -> None:
        assert client.pid is not None
        pids.append(client.pid)

    run_with(SpawnLauncher(scripted_engine, "tiny"), check)
    assert not psutil.pid_exists(pids[0])


def test_an_engine_that_dies_again_and_again_still_finishes_the_request() -> None:
    async def check(client: EngineClient) -> None:
        wanted = request("a", num_tokens=20, seed=7)
        assert tokens(await read(client, wanted)) == expected_tokens(wanted)

    dying = partial(scripted_engine, die_after=6)
    run_with(ThreadLauncher(dying, dying, scripted_engine), check)


def test_a_stalled_engine_is_killed_and_its_request_resumed() -> None:
    async def check(client: EngineClient) -> None:
        wanted = request("a", num_tokens=5)
        reader = asyncio.create_task(read(client, wanted))
        await until(lambda: client.state is EngineState.RESTARTING)
        assert "after the engine ended (killed after 0.2 s without a step)" in client.state_detail
        assert tokens(await reader) == expected_tokens(wanted)

    policy = replace(POLICY, supervision=SupervisionPolicy(stall_timeout_s=0.2))
    run_with(ThreadLauncher(silent_engine, partial(scripted_engine, load_s=0.1)), check, policy)


def test_an_idle_engine_is_never_taken_for_a_stalled_one() -> None:
    async def check(client: EngineClient) -> None:
        await asyncio.sleep(0.6)
        assert client.state is EngineState.READY
        stream = client.generate(request("a"))
        await asyncio.sleep(0.1)
        assert client.state is EngineState.READY  # idle time before it does not count
        await stream.aclose()

    policy = replace(POLICY, supervision=SupervisionPolicy(stall_timeout_s=0.5))
    run_with(ThreadLauncher(silent_engine), check, policy)


def test_a_crash_loop_ends_in_failed_with_the_count_and_the_last_exit() -> None:
    async def check(client: EngineClient) -> None:
        assert client.state is EngineState.FAILED
        assert "ended 3 times within 600 s, the last time with: exit code 1" in client.state_detail

    policy = replace(POLICY, supervision=SupervisionPolicy(max_restarts=2))
    run_with(ThreadLauncher(crashing_engine), check, policy)


def test_requests_of_an_engine_that_fails_for_good_end_with_an_error() -> None:
    async def check(client: EngineClient) -> None:
        outputs = await read(client, request("a", num_tokens=20))
        assert len(tokens(outputs)) == 4
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert "The engine failed" in str(outputs[-1].error)
        assert client.state is EngineState.FAILED

    policy = replace(POLICY, supervision=SupervisionPolicy(max_restarts=0))
    run_with(ThreadLauncher(partial(scripted_engine, die_after=4)), check, policy)


def test_a_request_that_keeps_killing_its_engine_is_given_up_and_the_engine_lives() -> None:
    async def check(client: EngineClient) -> None:
        outputs = await read(client, request("poison", num_tokens=100))
        assert outputs[-1].error == "The engine died 3 times under this request."
        await until(lambda: client.state is EngineState.READY)
        wanted = request("b", num_tokens=1)
        assert tokens(await read(client, wanted)) == expected_tokens(wanted)

    policy = replace(POLICY, max_resumes_per_request=2)
    run_with(ThreadLauncher(partial(scripted_engine, die_after=2)), check, policy)


def test_a_deadline_that_passes_while_there_is_no_engine_ends_the_request() -> None:
    async def check(client: EngineClient) -> None:
        wanted = request("a", num_tokens=20, deadline_s=time.time() + 0.6)
        outputs = await read(client, wanted)
        assert len(tokens(outputs)) == 3
        assert outputs[-1].finish_reason is FinishReason.DEADLINE

    policy = replace(POLICY, supervision=SupervisionPolicy(stall_timeout_s=0.4))
    dying = partial(scripted_engine, die_after=3)
    run_with(ThreadLauncher(dying, loading_engine), check, policy)


def test_draining_lets_streams_finish_and_refuses_new_ones() -> None:
    async def check(client: EngineClient) -> None:
        wanted = request("a", num_tokens=10)
        reader = asyncio.create_task(read(client, wanted))
        await asyncio.sleep(0.02)
        drain = asyncio.create_task(client.drain(5.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="draining"):
            client.generate(request("b"))
        await drain
        assert tokens(await reader) == expected_tokens(wanted)

    run_with(ThreadLauncher(partial(scripted_engine, step_s=0.01)), check)


def test_draining_ends_what_does_not_finish_in_time_with_an_error() -> None:
    async def check(client: EngineClient) -> None:
        reader = asyncio.create_task(read(client, request("a")))
        await asyncio.sleep(0.02)
        began_s = time.monotonic()
        await client.drain(0.1)
        assert time.monotonic() - began_s < 1.0
        assert [(o.finish_reason, o.error) for o in await reader] == [
            (FinishReason.ERROR, "The server is shutting down; the answer is incomplete.")
        ]

    run_with(ThreadLauncher(silent_engine), check)


def test_an_engine_that_is_still_loading_stops_at_once() -> None:
    async def main() -> float:
        client = EngineClient("tiny", ThreadLauncher(loading_engine), POLICY)
        client.start()
        await asyncio.sleep(0.02)
        began_s = time.monotonic()
        await client.drain(5.0)
        await client.stop()
        return time.monotonic() - began_s

    assert asyncio.run(main()) < 0.5


def test_prompt_logprobs_that_were_delivered_are_not_asked_for_again() -> None:
    live = LiveRequest(request("a", prompt_logprobs=2))
    assert live.resumption() == live.request
    logprobs = (None, TokenLogprobs(6, -1.0))
    live.push(StepOutput("a", (9,), prompt_logprobs=logprobs))
    live.push(StepOutput("a", (8, 7)))
    resumed = replace(live.request, prompt_logprobs=None, resumed_token_ids=(9, 8, 7))
    assert live.resumption() == resumed


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=8), st.integers(0, 8))
def test_a_resumption_holds_exactly_what_was_received_before_it(
    chunks: list[list[int]], num_read: int
) -> None:
    earlier = request("a", resumed_token_ids=(1, 2))
    live = LiveRequest(earlier)
    for chunk in chunks:
        live.push(StepOutput("a", tuple(chunk)))
    for _ in range(min(num_read, len(chunks))):
        asyncio.run(live.next_output())
    received = tuple(token for chunk in chunks for token in chunk)
    # What the client has read makes no difference: the rest is still going to be delivered.
    assert live.resumption() == replace(earlier, resumed_token_ids=(1, 2, *received))


def test_the_restart_delay_doubles_and_old_deaths_are_forgotten() -> None:
    budget = RestartBudget(max_restarts=4, window_s=100.0)
    assert [budget.record_death(t) for t in (0.0, 1.0, 2.0, 3.0)] == [0.0, 0.25, 0.5, 1.0]
    assert budget.record_death(4.0) is None
    assert budget.record_death(200.0) == 0.0


@pytest.mark.parametrize(
    ("exitcode", "text"),
    [
        (1, "exit code 1"),
        (-9, "killed by SIGKILL"),
        (-77, "killed by signal 77"),
        (None, "it closed its connection"),
    ],
)
def test_exits_are_described_for_people(exitcode: int | None, text: str) -> None:
    assert describe_exit(exitcode) == text
