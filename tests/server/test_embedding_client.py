"""The client of an embedding engine: vectors in order, death, refusals, cancellation, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest

from scheduler.messages import Abort, EmbedRequest, EmbedResult, EmbedStep, EngineReady, StepStats
from server.embedding_client import EmbeddingClient
from server.engine_client import ClientPolicy
from server.engine_process import SpawnLauncher
from server.engine_state import EngineState
from server.errors import EngineUnavailable, GenerationFailed, QueueFull
from server.loadable_embedder import LoadableEmbedder
from server.metrics import Metrics
from server.models import ModelManager
from server.supervisor import SupervisionPolicy
from tests.server.embedder import CONFIG, counting_engine, vectors_of, word_tokenizer
from tests.server.engine_scripts import INFO, ThreadLauncher, loading_engine, silent_engine

POLICY = ClientPolicy(1, 1, supervision=SupervisionPolicy(stall_timeout_s=30.0))
INPUTS = ((4,), (4, 5), (6, 6, 6), (5, 5), (7,))

Test = Callable[[EmbeddingClient], Awaitable[None]]


def run_with(launcher: Any, test: Test, policy: ClientPolicy = POLICY) -> None:
    async def main() -> None:
        client = EmbeddingClient("tiny", launcher, policy, 4)
        client.start()
        try:
            await client.wait_settled()
            await test(client)
        finally:
            await client.stop()

    asyncio.run(asyncio.wait_for(main(), 25))


def request(name: str = "a") -> EmbedRequest:
    return EmbedRequest(name, INPUTS)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_vectors_come_in_the_order_of_the_inputs() -> None:
    async def check(client: EmbeddingClient) -> None:
        np.testing.assert_array_equal(await client.embed(request()), vectors_of(INPUTS))
        assert (client.num_unfinished, client.stats.total_steps) == (0, 2)

    run_with(ThreadLauncher(counting_engine), check)


def test_a_request_is_computed_again_after_the_engine_died() -> None:
    async def check(client: EmbeddingClient) -> None:
        np.testing.assert_array_equal(await client.embed(request()), vectors_of(INPUTS))

    dying = partial(counting_engine, die_after=1)
    run_with(ThreadLauncher(dying, dying, counting_engine), check)


def test_a_killed_engine_process_costs_a_pause_and_no_error() -> None:
    async def check(client: EmbeddingClient) -> None:
        first_pid = client.pid
        assert first_pid is not None
        psutil.Process(first_pid).suspend()
        waiting = asyncio.create_task(client.embed(request()))
        await asyncio.sleep(0.05)
        psutil.Process(first_pid).kill()
        np.testing.assert_array_equal(await waiting, vectors_of(INPUTS))
        assert client.pid != first_pid

    run_with(SpawnLauncher(counting_engine, "tiny"), check)


def test_a_request_that_ends_every_engine_is_given_up() -> None:
    async def check(client: EmbeddingClient) -> None:
        with pytest.raises(GenerationFailed, match="The engine died 2 times under this request"):
            await client.embed(request())
        assert client.num_unfinished == 0

    launcher = ThreadLauncher(partial(counting_engine, die_after=1, per_batch=1))
    run_with(launcher, check, replace(POLICY, max_resumes_per_request=1))


def test_a_stalled_engine_is_killed_and_the_request_computed_by_the_next() -> None:
    async def check(client: EmbeddingClient) -> None:
        np.testing.assert_array_equal(await client.embed(request()), vectors_of(INPUTS))

    policy = replace(POLICY, supervision=SupervisionPolicy(stall_timeout_s=0.2))
    run_with(ThreadLauncher(silent_engine, counting_engine), check, policy)


def test_a_cancelled_request_is_aborted_in_the_engine() -> None:
    launcher = ThreadLauncher(silent_engine)

    async def check(client: EmbeddingClient) -> None:
        waiting = asyncio.create_task(client.embed(request()))
        await until(lambda: client.num_unfinished == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert client.num_unfinished == 0
        await until(lambda: launcher.sent(Abort) == [Abort("a")])

    run_with(launcher, check)


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async def check(client: EmbeddingClient) -> None:
        waiting = [asyncio.create_task(client.embed(request(name))) for name in "ab"]
        await until(lambda: client.num_unfinished == 2)
        with pytest.raises(QueueFull, match="2 requests with 18 tokens are unfinished; it takes 2"):
            await client.embed(request("c"))
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    run_with(ThreadLauncher(silent_engine), check)


def test_tokens_are_counted_too_but_a_request_alone_is_always_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.embedding_client.MAX_QUEUED_EMBEDDING_TOKENS", 5)

    async def check(client: EmbeddingClient) -> None:
        waiting = asyncio.create_task(client.embed(request("a")))
        await until(lambda: client.num_unfinished == 1)
        with pytest.raises(QueueFull, match="with 5 tokens"):
            await client.embed(request("b"))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    run_with(ThreadLauncher(silent_engine), check)


def test_an_error_of_the_engine_ends_the_request_with_its_sentence() -> None:
    def failing(connection: Any) -> None:
        connection.send(EngineReady(INFO))
        wanted = connection.recv()
        connection.send(EmbedStep((EmbedResult(wanted.request_id, error="no"),), StepStats()))
        connection.recv()

    async def check(client: EmbeddingClient) -> None:
        with pytest.raises(GenerationFailed, match=r"^The engine failed: no\.$") as caught:
            await client.embed(request())
        assert caught.value.code == "embedding_failed"

    run_with(ThreadLauncher(failing), check)


def test_requests_are_refused_while_draining_and_live_ones_end_with_an_error() -> None:
    async def check(client: EmbeddingClient) -> None:
        waiting = asyncio.create_task(client.embed(request()))
        await until(lambda: client.num_unfinished == 1)
        await client.drain(0.05)
        with pytest.raises(GenerationFailed, match="The server is shutting down"):
            await waiting
        with pytest.raises(EngineUnavailable, match="tiny is draining"):
            await client.embed(request("b"))

    run_with(ThreadLauncher(silent_engine), check)


def test_requests_are_refused_while_loading() -> None:
    async def main() -> None:
        client = EmbeddingClient("tiny", ThreadLauncher(loading_engine), POLICY, 4)
        client.start()
        with pytest.raises(EngineUnavailable, match="tiny is loading"):
            await client.embed(request())
        await client.stop()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_the_manager_loads_serves_and_unloads_an_embedding_model() -> None:
    async def main() -> None:
        models, launcher = ModelManager(POLICY, Metrics()), ThreadLauncher(counting_engine)
        loadable = LoadableEmbedder("counts", launcher, word_tokenizer(), CONFIG, 16, 1)
        served = models.load_any(loadable)
        await models.wait_settled()
        assert models.get_embedder(None) is models.get_embedder("counts") is served
        assert (list(models.list()), models.failures()) == ([], {})
        vectors = await models.get_embedder(None).engine.embed(request())
        np.testing.assert_array_equal(vectors, vectors_of(INPUTS))
        await models.unload("counts")
        assert models.everything() == ()
        assert served.engine.state is EngineState.DRAINING
        await models.stop()

    asyncio.run(asyncio.wait_for(main(), 20))
