"""Draws the progress of fetching and importing as bars on stderr; silent when it is no terminal.

One bar per task, in the order in which the tasks begin. Knows nothing about models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from server.sources import progress as contract

LABELS = {
    "download": "downloading",
    "unpack": "unpacking",
    "verify": "verifying",
    "import": "importing",
    "compile": "compiling",
    "quantize": "quantizing",
    "synthesize": "synthesizing",
}


@contextlib.contextmanager
def progress_bars(console: Console) -> Iterator[contract.Progress]:
    """Yields the callback that the model store wants."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def report(task: str, done: int, total: int) -> None:
            if task not in tasks:
                for earlier in tasks.values():
                    finish(bars, earlier)
                tasks[task] = bars.add_task(LABELS.get(task, task), total=None)
            bars.update(tasks[task], completed=done, total=total or None)

        yield report
        for task in tasks.values():
            finish(bars, task)


def finish(bars: Progress, task: TaskID) -> None:
    """A task of unknown length ends as a full bar too."""
    total = bars.tasks[task].total or 1
    bars.update(task, total=total, completed=total)
