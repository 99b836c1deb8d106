"""Responses that are generated while nobody waits: a bounded number of tasks by response id.

A run's task writes its outcome itself; here it is only held, so that it is not collected, and
cancelled on request. Belongs to the event loop's thread. Knows nothing of responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from server.errors import QueueFull


class BackgroundRuns:
    def __init__(self, max_runs: int) -> None:
        self._max_runs = max_runs
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def check_room(self) -> None:
        """Raise QueueFull if one more run would be too many."""
        if len(self._tasks) >= self._max_runs:
            raise QueueFull(
                f"{len(self._tasks)} background responses are in progress, which is the most that "
                "run at one time. Please try again later.",
                retry_after_s=5.0,
            )

    def start(self, run_id: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"background response {run_id}")
        self._tasks[run_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(run_id, None))

    async def cancel(self, run_id: str) -> None:
        """End a run and wait until it has written its outcome. Unknown ids are finished ones."""
        task = self._tasks.get(run_id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
