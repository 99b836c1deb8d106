"""How work that takes long tells where it is. The command line draws it; tests record it."""

from __future__ import annotations

from collections.abc import Callable

# (what is being done, units done, units in all or 0 when unknown). Bytes for downloads.
Progress = Callable[[str, int, int], None]


def no_progress(task: str, done: int, total: int) -> None:
    """For callers that do not care."""
