"""A process that uses the NPU lease as a test tells it, over a pipe."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from engine.npu.lease import NpuLease


def use_lease(connection: Connection, path: Path) -> None:
    """Says "asks" before it asks and "has" when it has it; gives it back at any word."""
    lease = NpuLease(path)
    while connection.recv() == "ask":
        connection.send("asks")
        with lease:
            connection.send("has")
            connection.recv()
        connection.send("gave back")
    lease.close()


def count_up(path: Path, counter: Path, times: int) -> None:
    """Reads, adds one and writes, under the lease: lost updates show that two had it."""
    lease = NpuLease(path)
    for _ in range(times):
        with lease:
            number = int(counter.read_text())
            counter.write_text(str(number + 1))
