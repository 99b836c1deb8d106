"""Engines of a few lines that speak the messages, and launchers that run them in a thread.

Every token depends on the seed, the position and all tokens before it, so that a wrong resume
gives different tokens. Nothing here needs the scheduler.
"""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

from engine.sampling_params import SamplingParams
from scheduler.messages import (
    Abort,
    EngineFailed,
    EngineInfo,
    EngineLoading,
    EngineReady,
    FinishReason,
    GenerationRequest,
    Shutdown,
    StepOutput,
    StepResult,
    StepStats,
)

INFO = EngineInfo(
    max_model_len=256,
    num_blocks=64,
    block_size=16,
    kv_format="int8",
    vocab_size=1000,
    device="cpu",
    device_reason="scripted",
    num_threads=1,
    batch_invariant=True,
    weight_format="none",
    kv_bytes=1 << 20,
    max_num_seqs=4,
)

Entry = Callable[[Any], None]


def request(
    request_id: str, num_tokens: int = 8, seed: int = 0, **changes: Any
) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=num_tokens, seed=seed)
    return GenerationRequest(request_id, (5, 6, 7), sampling, **changes)


def expected_tokens(wanted: GenerationRequest) -> list[int]:
    """What an undisturbed engine generates for `wanted`, its resumed tokens included."""
    tokens: list[int] = []
    while len(tokens) < wanted.sampling.max_tokens:
        tokens.append(_next_token(wanted, tokens))
    return tokens


def _next_token(wanted: GenerationRequest, tokens: list[int]) -> int:
    state = f"{wanted.sampling.seed}:{wanted.prompt_token_ids}:{tokens}"
    return zlib.crc32(state.encode()) % 1000


class Sequences:
    """The state of a scripted engine: request and tokens of everything that runs."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[GenerationRequest, list[int]]] = {}
        self.num_cached = 0

    def take(self, message: GenerationRequest | Abort) -> None:
        if isinstance(message, Abort):
            self.running.pop(message.request_id, None)
        else:
            self.running[message.request_id] = (message, list(message.resumed_token_ids))

    def step(self) -> StepResult:
        outputs = tuple(self._step_one(*entry) for entry in tuple(self.running.values()))
        return StepResult(outputs, StepStats(num_running=len(self.running), num_blocks=64))

    def _step_one(self, wanted: GenerationRequest, tokens: list[int]) -> StepOutput:
        tokens.append(_next_token(wanted, tokens))
        done = len(tokens) >= wanted.sampling.max_tokens
        if done:
            del self.running[wanted.request_id]
        return StepOutput(
            wanted.request_id,
            (tokens[-1],),
            FinishReason.LENGTH if done else None,
            num_cached_tokens=len(wanted.resumed_token_ids),
        )


def scripted_engine(
    connection: Any, step_s: float = 0.0, die_after: int | None = None, load_s: float = 0.0
) -> None:
    """Generates until `Shutdown`; with `die_after` it ends after that many steps."""
    connection.send(EngineLoading("reading the script"))
    time.sleep(load_s)
    connection.send(EngineReady(INFO))
    sequences, num_steps = Sequences(), 0
    while die_after is None or num_steps < die_after:
        while not sequences.running or connection.poll(0):
            message = connection.recv()
            if isinstance(message, Shutdown):
                return
            sequences.take(message)
        time.sleep(step_s)
        connection.send(sequences.step())
        num_steps += 1


def silent_engine(connection: Any) -> None:
    """Gets ready, accepts requests, and never makes a step."""
    connection.send(EngineReady(INFO))
    while not isinstance(connection.recv(), Shutdown):
        pass


def loading_engine(connection: Any) -> None:
    """Stays in the phase of loading until it is killed."""
    connection.send(EngineLoading("compiling the kernels"))
    connection.recv()


def failing_engine(connection: Any) -> None:
    connection.send(EngineFailed("the bundle is damaged; run `hexlm pull` again"))


def crashing_engine(connection: Any) -> None:
    """Dies before it is ready."""


class QueueConnection:
    """One end of an in-process pipe; `sever` is what the death of a process does to it."""

    def __init__(self, inbox: queue.Queue[Any], outbox: queue.Queue[Any]) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self.sent: list[Any] = []

    def send(self, obj: Any) -> None:
        self.sent.append(obj)
        self._outbox.put(obj)

    def recv(self) -> Any:
        message = self._inbox.get()
        if message is EOFError:
            self._inbox.put(EOFError)
            raise EOFError
        return message

    def poll(self, timeout: float = 0.0) -> bool:
        return not self._inbox.empty()

    def sever(self) -> None:
        self._inbox.put(EOFError)
        self._outbox.put(EOFError)

    def close(self) -> None:
        self.sever()


class ThreadHandle:
    """A thread in the role of an engine process. `exitcode` is -9 after `kill`."""

    pid = 4242

    def __init__(self, entry: Entry, connection: QueueConnection) -> None:
        self._connection = connection
        self._was_killed = False
        self._thread = threading.Thread(target=self._run, args=(entry,), daemon=True)
        self._thread.start()

    @property
    def exitcode(self) -> int | None:
        if self._was_killed:
            return -9
        return None if self.is_alive() else 1

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def kill(self) -> None:
        if self.is_alive():
            self._was_killed = True
            self._connection.sever()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _run(self, entry: Entry) -> None:
        try:
            entry(self._connection)
        except EOFError:
            pass
        finally:
            self._connection.sever()


class ThreadLauncher:
    """Each launch runs the next of `entries`; the last one is repeated."""

    def __init__(self, *entries: Entry) -> None:
        self._entries = entries
        self.links: list[tuple[QueueConnection, ThreadHandle]] = []

    def launch(self) -> tuple[QueueConnection, ThreadHandle]:
        to_engine: queue.Queue[Any] = queue.Queue()
        from_engine: queue.Queue[Any] = queue.Queue()
        ours = QueueConnection(from_engine, to_engine)
        theirs = QueueConnection(to_engine, from_engine)
        entry = self._entries[min(len(self.links), len(self._entries) - 1)]
        self.links.append((ours, ThreadHandle(entry, theirs)))
        return self.links[-1]

    def sent(self, kind: type[Any]) -> list[Any]:
        """Messages of `kind` that were sent to any life of the engine."""
        return [m for ours, _ in self.links for m in ours.sent if isinstance(m, kind)]
