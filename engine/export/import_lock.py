"""A lock file, so that two processes never import the same model at the same moment.

The file is created exclusively and holds the owner's process id and start time. A lock whose
owner is gone is taken over. Waiting has no limit: the owner is alive, and ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

POLL_S = 0.2
UNREADABLE_GRACE_S = 5.0

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def import_lock(path: Path) -> Iterator[bool]:
    """Holds the lock for the length of the block. Yields whether another process had it first."""
    waited = False
    while not try_lock(path):
        if not waited:
            logger.info("waiting for another process that imports this model (%s)", path)
        waited = True
        time.sleep(POLL_S)
    try:
        yield waited
    finally:
        path.unlink(missing_ok=True)


def try_lock(path: Path) -> bool:
    """Takes the lock if nobody has it; removes it first if its owner is gone."""
    if path.exists() and not remove_if_stale(path):
        return False
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except (FileExistsError, PermissionError):
        # Windows answers with PermissionError while another process is deleting the file.
        if not path.exists():
            raise
        return False
    with os.fdopen(handle, "w", encoding="ascii") as stream:
        stream.write(own_identity())
    return True


def own_identity() -> str:
    return f"{os.getpid()} {psutil.Process().create_time():.2f}"


def remove_if_stale(path: Path) -> bool:
    """True if the lock is gone now. Two processes may both see a stale lock: each moves the file
    away before deleting it and puts back what turns out to be a fresh one."""
    try:
        identity = path.read_text(encoding="ascii")
        if is_alive(identity, age_s=time.time() - path.stat().st_mtime):
            return False
        moved = path.with_name(f"{path.name}.{os.getpid()}")
        path.replace(moved)
        if moved.read_text(encoding="ascii") != identity:
            moved.replace(path)
            return False
        moved.unlink()
    except FileNotFoundError:
        return True
    except (PermissionError, UnicodeDecodeError):
        return False
    return True


def is_alive(identity: str, age_s: float) -> bool:
    """The start time tells the owner from a later process with the same id."""
    pid, _, started = identity.partition(" ")
    if not pid.isdecimal() or not started:
        return age_s < UNREADABLE_GRACE_S  # created a moment ago and not yet written
    try:
        return f"{psutil.Process(int(pid)).create_time():.2f}" == started
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
