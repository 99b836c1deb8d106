"""The embedding loop over a fake encoder: batches, failures, aborts, and its process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine.batch import Float32Array
from engine.encoder import EncoderFacts
from scheduler.embedding_loop import EMBED_ERROR, EmbeddingLoop
from scheduler.embedding_process import run_embedding_engine
from scheduler.embedding_queue import BatchPolicy, EmbeddingQueue
from scheduler.messages import (
    Abort,
    EmbedRequest,
    EmbedResult,
    EmbedStep,
    EngineFailed,
    EngineLoading,
    EngineReady,
    Shutdown,
    ToEngine,
)

POLICY = BatchPolicy(window_s=0.0, max_batch=8, max_length_difference=100)
BAD = 13


class FakeEncoder:
    """The vector of a text is (its length, its first id); a text that holds BAD raises."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, ...]]] = []

    def encode(self, sequences: Sequence[Sequence[int]]) -> Float32Array:
        self.batches.append([tuple(ids) for ids in sequences])
        if any(BAD in ids for ids in sequences):
            raise RuntimeError("the device said no")
        return np.array([[len(ids), ids[0]] for ids in sequences], np.float32)


def run(*messages: ToEngine, encoder: FakeEncoder | None = None) -> list[EmbedStep]:
    """All messages are there when the loop starts; a `Shutdown` follows the last batch."""
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    for message in messages:
        inbox.put(message)
    waiting = EmbeddingQueue(POLICY)
    steps: list[EmbedStep] = []

    def send(step: EmbedStep) -> None:
        steps.append(step)
        if not waiting.num_texts:
            inbox.put(Shutdown())

    EmbeddingLoop(encoder or FakeEncoder(), waiting, inbox, send).run()
    return steps


def vectors_of(result: EmbedResult) -> dict[int, list[float]]:
    rows = np.frombuffer(result.vectors, "<f4").reshape(len(result.indexes), -1)
    return dict(zip(result.indexes, rows.tolist(), strict=True))


def test_requests_share_a_batch_and_each_gets_its_own_vectors() -> None:
    encoder = FakeEncoder()
    first, second = EmbedRequest("a", ((5,), (6, 6))), EmbedRequest("b", ((7, 7, 7),))
    (step,) = run(first, second, encoder=encoder)
    assert len(encoder.batches) == 1
    results = {result.request_id: vectors_of(result) for result in step.results}
    assert results == {"a": {0: [1.0, 5.0], 1: [2.0, 6.0]}, "b": {0: [3.0, 7.0]}}


def test_stats_count_texts_tokens_and_steps() -> None:
    steps = run(EmbedRequest("a", tuple((5, 5) for _ in range(11))))
    assert [step.stats.num_waiting for step in steps] == [3, 0]
    assert steps[-1].stats.total_steps == 2
    assert steps[-1].stats.total_prompt_tokens == 22
    assert len(steps[-1].stats.queue_times_s) == 3


def test_one_bad_text_ends_its_own_request_only() -> None:
    bad, good = EmbedRequest("bad", ((5,), (BAD,))), EmbedRequest("good", ((6,),))
    (step,) = run(bad, good)
    by_id = {result.request_id: result for result in step.results}
    assert by_id["bad"] == EmbedResult("bad", error=EMBED_ERROR)
    assert vectors_of(by_id["good"]) == {0: [1.0, 6.0]}
    assert step.stats.total_failed_steps == 1


def test_the_rest_of_a_failed_request_is_not_computed() -> None:
    encoder = FakeEncoder()
    texts = [(5,)] * 20 + [(BAD, BAD)]  # the longest text goes first
    steps = run(EmbedRequest("bad", tuple(texts)), encoder=encoder)
    assert len(steps) == 1
    assert [len(batch) for batch in encoder.batches] == [8] + [1] * 8


def test_an_aborted_request_is_not_computed() -> None:
    encoder = FakeEncoder()
    run(EmbedRequest("a", ((5,),)), EmbedRequest("b", ((6,),)), Abort("a"), encoder=encoder)
    assert encoder.batches == [[(6,)]]


def test_the_loop_ends_when_nobody_takes_the_results() -> None:
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    inbox.put(EmbedRequest("a", ((5,),)))

    def send(step: EmbedStep) -> None:
        raise BrokenPipeError

    EmbeddingLoop(FakeEncoder(), EmbeddingQueue(POLICY), inbox, send).run()


class TimedInbox(queue.SimpleQueue[ToEngine]):
    """Messages that arrive at given times; waiting moves the clock instead of taking time."""

    def __init__(self, *arrivals: tuple[float, ToEngine]) -> None:
        self.now_s = 0.0
        self.arrivals = list(arrivals)

    def get(self, block: bool = True, timeout: float | None = None) -> ToEngine:
        next_s = self.arrivals[0][0]
        if next_s <= self.now_s or (block and (timeout is None or next_s <= self.now_s + timeout)):
            self.now_s = max(self.now_s, next_s)
            return self.arrivals.pop(0)[1]
        self.now_s += timeout or 0.0
        raise queue.Empty

    def get_nowait(self) -> ToEngine:
        return self.get(block=False)


def test_a_batch_takes_what_arrives_within_the_window_of_its_first_text() -> None:
    times_s = {"a": 1.0, "b": 1.002, "c": 1.0049, "d": 1.0051, "e": 5.0}
    arrivals = [(when, EmbedRequest(name, ((5,),))) for name, when in times_s.items()]
    inbox = TimedInbox(*arrivals, (9.0, Shutdown()))
    batches: list[tuple[float, list[str]]] = []

    def send(step: EmbedStep) -> None:
        batches.append((round(inbox.now_s, 6), [result.request_id for result in step.results]))

    waiting = EmbeddingQueue(BatchPolicy(window_s=0.005))
    EmbeddingLoop(FakeEncoder(), waiting, inbox, send, clock=lambda: inbox.now_s).run()
    assert batches == [(1.005, ["a", "b", "c"]), (1.0101, ["d"]), (5.005, ["e"])]


class Pipe:
    def __init__(self, *messages: ToEngine) -> None:
        self.inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        for message in messages:
            self.inbox.put(message)
        self.sent: list[Any] = []

    def send(self, obj: Any) -> None:
        self.sent.append(obj)
        if isinstance(obj, EmbedStep):
            self.inbox.put(Shutdown())

    def recv(self) -> ToEngine:
        return self.inbox.get()


class Loaded:
    encoder = FakeEncoder()
    facts = EncoderFacts(64, 100, "cpu", "a test", 1, "f32")


def test_the_engine_reports_its_phases_and_facts_and_then_serves() -> None:
    def load(report: Callable[[str], None]) -> Loaded:
        report("reading")
        return Loaded()

    pipe = Pipe(EmbedRequest("a", ((5,),)))
    run_embedding_engine(pipe, load, POLICY)
    loading, ready, step = pipe.sent
    assert loading == EngineLoading("reading")
    assert isinstance(ready, EngineReady)
    assert (ready.info.max_model_len, ready.info.kv_format, ready.info.max_num_seqs) == (
        64, "none", 8,
    )  # fmt: skip
    assert isinstance(step, EmbedStep)


def test_an_engine_that_cannot_load_says_why_in_one_line() -> None:
    def load(report: Callable[[str], None]) -> Loaded:
        raise ValueError("the bundle\nis damaged")

    closed = threading.Event()
    pipe = Pipe(Shutdown())
    run_embedding_engine(pipe, load, POLICY, on_closed=closed.set)
    assert pipe.sent == [EngineFailed("the bundle is damaged")]
    assert closed.wait(5)
