"""The running server: sockets, signals, readiness and the orderly end.

```
listening ──► engines load ──► ready ──► SIGINT/SIGTERM: drain ──► sockets close ──► engines end
```

uvicorn runs its lifespan shutdown only after all connections are closed, and open streams keep
those open, so the drain is driven from here. Does not know models, routes or configuration files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn

from server.listener import listen_error
from server.models import ModelManager

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
_CLOSE_S = 1
"""How long uvicorn waits for connections after the drain; with the rest, less than 2 s."""

_END_S = 1.8
_SECOND_SIGNAL_EXIT = 130


class StartFailed(Exception):
    """No model could be loaded; the message is one line with the reasons."""


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the service has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Service:
    """Serves `app` on `sock` until a signal. `on_ready` is called once, when requests are taken.

    `start_models` is called in the event loop after the socket listens: it must begin to load.
    """

    def __init__(
        self,
        app: Any,
        sock: socket.socket,
        models: ModelManager,
        start_models: Callable[[], None],
        on_ready: Callable[[], None],
        drain_timeout_s: float,
    ) -> None:
        self._sock = sock
        self._models = models
        self._start_models = start_models
        self._on_ready = on_ready
        self._drain_timeout_s = drain_timeout_s
        self._stop = asyncio.Event()
        self._signals_seen = 0
        self._http = _HttpServer(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                ws="none",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_CLOSE_S,
            )
        )

    async def run(self) -> None:
        """Return after an orderly end.

        Raises:
            StartFailed: every model failed to load.
            ListenError: somebody else took the port in the meantime.
        """
        with self._signals():
            serving = asyncio.create_task(self._serve_http())
            try:
                await self._run_until_stopped(serving)
            finally:
                await self._end(serving)

    async def _serve_http(self) -> None:
        host, port = self._sock.getsockname()[:2]
        try:
            await self._http.serve(sockets=[self._sock])
        except OSError as error:
            raise listen_error(host, port, error) from error

    async def _run_until_stopped(self, serving: asyncio.Task[None]) -> None:
        self._start_models()
        stopping = asyncio.create_task(self._stop.wait())
        settled = asyncio.create_task(self._models.wait_settled())
        try:
            await asyncio.wait({serving, stopping, settled}, return_when="FIRST_COMPLETED")
            if settled.done() and not self._stop.is_set():
                self._announce()
                await asyncio.wait({serving, stopping}, return_when="FIRST_COMPLETED")
            if self._stop.is_set():
                logger.info("draining; another signal ends the server at once")
                await self._models.drain(self._drain_timeout_s)
        finally:
            stopping.cancel()
            settled.cancel()

    def _announce(self) -> None:
        failures = self._models.failures()
        if len(failures) == len(self._models.everything()):
            raise StartFailed("; ".join(f"{name}: {why}" for name, why in failures.items()))
        self._on_ready()

    async def _end(self, serving: asyncio.Task[None]) -> None:
        """Close the sockets and end the engines side by side, in bounded time."""
        self._http.should_exit = True
        try:
            await asyncio.wait_for(asyncio.gather(serving, self._models.stop()), _END_S)
        except TimeoutError:
            logger.warning("some connections or engines did not end in time and are cut")
        finally:
            self._models.kill()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """`signal.signal` on every system: the loop's own handlers do not exist on Windows."""
        names = ("SIGINT", "SIGTERM", "SIGBREAK")
        handled = [getattr(signal, name) for name in names if hasattr(signal, name)]
        loop = asyncio.get_running_loop()

        def handle(number: int, frame: FrameType | None) -> None:
            # Between any two bytecodes of the loop: no logging here, and nothing that could block.
            if self._signals_seen:
                self._models.kill()
                os._exit(_SECOND_SIGNAL_EXIT)
            self._signals_seen += 1
            loop.call_soon_threadsafe(self._stop.set)

        before = {number: signal.signal(number, handle) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
