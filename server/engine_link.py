"""One life of one engine process: its pipe, its two threads, its end. Knows no requests.

The reader thread blocks in `recv` and hands each message to the event loop; the writer thread
sends, so that a stopped engine with a full pipe never blocks the loop. Both are plain blocking
threads because Windows has no readiness events for pipes. Everything public belongs to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from scheduler.messages import FromEngine, ToEngine
from server.engine_process import EngineLauncher

logger = logging.getLogger(__name__)

_EXIT_GRACE_S = 2.0
"""How long an engine that closed its pipe may take to exit before it is killed."""


class EngineLink:
    """Launches at construction. `on_death` is called once, on the loop, after the last message."""

    def __init__(
        self,
        launcher: EngineLauncher,
        on_message: Callable[[EngineLink, FromEngine], None],
        on_death: Callable[[EngineLink], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_death = on_death
        self._outbox: SimpleQueue[ToEngine | None] = SimpleQueue()
        self._dead = asyncio.Event()
        self._connection, self.handle = launcher.launch()
        self._writer = threading.Thread(target=self._write, name="engine-writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name="engine-reader", daemon=True)
        self._writer.start()
        self._reader.start()

    @property
    def is_dead(self) -> bool:
        return self._dead.is_set()

    def send(self, message: ToEngine) -> None:
        """Never blocks and never fails: what a dead engine does not get is resubmitted later."""
        self._outbox.put(message)

    def kill(self) -> None:
        self.handle.kill()

    async def wait_dead(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._dead.wait(), timeout_s)
        return self.is_dead

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return  # the reader sees the same end and reports it

    def _read(self) -> None:
        try:
            while True:
                self._to_loop(self._on_message, self, self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception:  # a message that cannot be unpickled: the engine counts as dead
            logger.exception("engine %s sent what cannot be read", self.handle.pid)
        finally:
            self._bury()

    def _bury(self) -> None:
        """Reap the process, end the writer, then close: closing first could hit a reused fd."""
        self.handle.join(_EXIT_GRACE_S)
        if self.handle.exitcode is None:
            self.handle.kill()
            self.handle.join(_EXIT_GRACE_S)
        self._outbox.put(None)
        self._writer.join()
        self._connection.close()
        self._to_loop(self._report_death)

    def _report_death(self) -> None:
        self._dead.set()
        self._on_death(self)

    def _to_loop(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended; nobody is left to tell
            self._loop.call_soon_threadsafe(callback, *args)
