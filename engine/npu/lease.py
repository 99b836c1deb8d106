"""The NPU lease: one process at a time talks to the NPU, in the order in which they asked.

Two sessions that use the HTP at the same time can wedge it, and every engine process has sessions
of its own. So an engine holds the lease for each step that goes to the NPU, and gives it back after
the step: engines that share the NPU take turns step by step.

A process draws a ticket: the number after the newest one, under a short lock. It holds a lock on
the byte of its ticket until it is done, and waits for the bytes of all tickets before its own. A
process that dies, waiting or holding, frees its byte with that, so nobody waits for the dead.
"""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path
from types import TracebackType

from engine.errors import DeviceUnavailable
from engine.npu.file_lock import lock, unlock

_NUMBERS = struct.Struct("<qq")  # the next ticket; the oldest one that may still be held
_MUTEX = 1 << 20
"""The byte whose lock guards the numbers; those of the tickets begin after it."""

_TICKETS = _MUTEX + 1


class NpuLease:
    """One per process and path, used as a context. Its threads exclude each other, too."""

    def __init__(self, path: Path) -> None:
        """Raises DeviceUnavailable when the file cannot be opened."""
        self._path = path
        self._threads = threading.Lock()
        self._ticket = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        except OSError as error:
            raise DeviceUnavailable(
                f"the NPU's lease {path} cannot be opened ({error.strerror or error}): make the "
                "folder writable, or use --device cpu"
            ) from error

    def __enter__(self) -> None:
        """Waits for its turn. Raises DeviceUnavailable when the file cannot be locked."""
        self._threads.acquire()
        try:
            first, self._ticket = self._draw()
            before = self._ticket - first
            if before:
                lock(self._file, _TICKETS + first, before, shared=True)
                unlock(self._file, _TICKETS + first, before)
                self._forget_those_before()
        except OSError as error:
            self._threads.release()
            raise DeviceUnavailable(f"the NPU's lease {self._path} failed: {error}") from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        unlock(self._file, _TICKETS + self._ticket, 1)
        self._threads.release()

    def close(self) -> None:
        os.close(self._file)

    def _draw(self) -> tuple[int, int]:
        """(the oldest ticket that may be held, a new one whose byte is locked)."""
        lock(self._file, _MUTEX, 1)
        try:
            ticket, first = self._read()
            lock(self._file, _TICKETS + ticket, 1)
            self._write(ticket + 1, first)
        finally:
            unlock(self._file, _MUTEX, 1)
        return first, ticket

    def _forget_those_before(self) -> None:
        """All tickets before this one are done; who comes later need not look at them again."""
        lock(self._file, _MUTEX, 1)
        try:
            newest, _ = self._read()
            self._write(newest, self._ticket)
        finally:
            unlock(self._file, _MUTEX, 1)

    def _read(self) -> tuple[int, int]:
        os.lseek(self._file, 0, os.SEEK_SET)
        content = os.read(self._file, _NUMBERS.size)
        if len(content) < _NUMBERS.size:
            return 0, 0  # a new file
        ticket, first = _NUMBERS.unpack(content)
        return (ticket, first) if 0 <= first <= ticket else (0, 0)

    def _write(self, ticket: int, first: int) -> None:
        os.lseek(self._file, 0, os.SEEK_SET)
        os.write(self._file, _NUMBERS.pack(ticket, first))


class NoLease:
    """For what no other process can disturb: the emulator, and tests."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass
