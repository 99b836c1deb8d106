"""How an engine process is started and held. Knows processes and pipes, not their messages.

`EngineLauncher` is the seam: `SpawnLauncher` starts a fresh interpreter (never a fork: the server
has threads, and Windows has no fork); tests run the same entry in a thread.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, Protocol

from engine.npu.fault_memory import HANG_EXIT_CODE


class EngineConnection(Protocol):
    """The part of a `multiprocessing` connection that is used; one reader, one writer thread."""

    def send(self, obj: Any, /) -> None: ...

    def recv(self) -> Any:
        """Block until a message is there. Raises EOFError or OSError when the other end died."""
        ...

    def close(self) -> None: ...


class EngineHandle(Protocol):
    """A started engine. `exitcode` is None while it lives, -N if signal N ended it."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def is_alive(self) -> bool: ...

    def kill(self) -> None:
        """End it now, without its consent; harmless when it has already ended."""
        ...

    def join(self, timeout: float | None = None) -> None: ...


class EngineLauncher(Protocol):
    def launch(self) -> tuple[EngineConnection, EngineHandle]: ...


class SpawnLauncher:
    """Runs `entry(connection)` in a spawned process; `entry` must be picklable.

    The process is a daemon, so it cannot outlive an orderly exit of the server. When the server
    is killed the pipe breaks, and the entry must take that as its end.
    """

    def __init__(self, entry: Callable[[Any], None], name: str) -> None:
        self._entry = entry
        self._name = name

    def launch(self) -> tuple[EngineConnection, EngineHandle]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=True)
        process = context.Process(
            target=self._entry, args=(theirs,), name=f"hexlm-engine-{self._name}", daemon=True
        )
        with _engine_ignores_terminal():
            process.start()
        theirs.close()  # or the pipe would never report the engine's death
        return ours, process


@contextmanager
def _engine_ignores_terminal() -> Iterator[None]:
    """Ctrl-C and a service manager signal the whole group: the engine must outlive the drain.

    A new process inherits the signal mask of the thread that starts it, so that also its first
    moments are covered. The resource tracker is started before, since it unblocks both signals.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield  # Windows: the engine's entry ignores Ctrl-C by itself
        return
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def describe_exit(exitcode: int | None) -> str:
    """Why a process ended, for people: "killed by SIGKILL", "exit code 1"."""
    if exitcode is None:
        return "it closed its connection"
    if exitcode == HANG_EXIT_CODE:
        return "it ended itself, because a call into the NPU did not come back"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return f"killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"killed by signal {-exitcode}"
