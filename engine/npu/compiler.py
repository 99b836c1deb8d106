"""Compiles what a context store lacks, in a child process, one process at a time per store.

Groups that are there and valid are left alone, so an interrupted run goes on where it was. A
child that dies is started once more where it died; dying there again is an error that names the
graph. Knows neither the provider nor the graphs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from engine.errors import CompileFailed
from engine.export.import_lock import POLL_S, try_lock
from engine.npu.compile_task import CompileTask, encode_task
from engine.npu.context_store import ContextStore, GroupState

OnProgress = Callable[[int, int, str], None]
"""(graphs that are there, graphs of the store, what is done now)."""

CHILD = (sys.executable, "-m", "engine.npu.compile_child")
LOCK_FILE = ".lock"
MAX_DEATHS = 2

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CompileReport:
    """What a run did. `seconds` per graph, in the order of compiling; `num_bytes` per group."""

    seconds: dict[str, float] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Death:
    """How a child ended that did not tell why."""

    graph: str
    how: str


def compile_missing(
    store: ContextStore,
    on_progress: OnProgress = lambda done, total, what: None,
    *,
    again: bool = False,
    background: bool = False,
    child: Sequence[str] = CHILD,
) -> CompileReport:
    """Returns when every group of the store is valid. Blocks for as long as that takes.

    `again`: what is valid is made again, too. `background`: others on this machine come first.
    Raises CompileFailed, with the provider's reason and the graph, or OSError.
    """
    report = CompileReport()
    deaths: Counter[str] = Counter()
    with _lock(store, on_progress):
        if again:
            store.clear()
        while todo := store.invalid():
            task = CompileTask(store.bundle.path, store.recipe, todo, background)
            death = _run_child(store, task, report, on_progress, child)
            if death is None:
                _expect_valid(store)
                break
            logger.warning("compiling %s: the process %s", death.graph, death.how)
            deaths[death.graph] += 1
            if deaths[death.graph] == MAX_DEATHS:
                raise CompileFailed(
                    f"compiling {death.graph} for the chip {store.recipe.soc_model} ends the "
                    f"compiler, which {death.how}; use --device cpu"
                )
    on_progress(store.num_graphs, store.num_graphs, "")
    return report


def _expect_valid(store: ContextStore) -> None:
    for check in store.checks():
        if check.state is not GroupState.VALID:
            raise CompileFailed(
                f"{check.group.name} was compiled and is {check.state} ({check.reason}); "
                f"check the disk of {store.folder}"
            )


@contextlib.contextmanager
def _lock(store: ContextStore, on_progress: OnProgress) -> Iterator[None]:
    """Waits for another process that compiles for the same store, and shows how it goes there."""
    store.folder.mkdir(parents=True, exist_ok=True)
    path = store.folder / LOCK_FILE
    if not try_lock(path):
        logger.info("another process compiles for this chip (%s)", path)
        while not try_lock(path):
            on_progress(store.num_present(), store.num_graphs, "another process")
            time.sleep(POLL_S)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _run_child(
    store: ContextStore,
    task: CompileTask,
    report: CompileReport,
    on_progress: OnProgress,
    child: Sequence[str],
) -> _Death | None:
    """None when the child finished its task. Raises CompileFailed for a reason that it gave."""
    done = store.num_graphs - sum(len(group.graphs) for group in task.groups)
    graph = task.groups[0].graphs[0].name
    with (
        tempfile.TemporaryFile() as stderr,
        subprocess.Popen(
            child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, encoding="utf-8"
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(encode_task(task))
                process.stdin.flush()  # and stays open: the child ends when we do
            for event in map(json.loads, process.stdout):
                graph = event.get("graph", graph)
                done += event["event"] == "compiled"
                _note(event, report)
                on_progress(done, store.num_graphs, graph)
        except BaseException:
            process.kill()
            raise
        code = process.wait()
        return None if code == 0 else _Death(graph, _how_it_ended(code, stderr))


def _note(event: dict[str, Any], report: CompileReport) -> None:
    match event:
        case {"event": "compiled", "graph": graph, "seconds": seconds}:
            report.seconds[graph] = seconds
        case {"event": "group", "group": group, "num_bytes": num_bytes}:
            report.num_bytes[group] = num_bytes
        case {"event": "failed", "message": message}:
            raise CompileFailed(message)


def _how_it_ended(code: int, stderr: IO[bytes]) -> str:
    try:
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    except ValueError:
        how = f"died of signal {-code}"
    stderr.seek(0)
    lines = stderr.read().decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{how}: {last[:200]}" if last else how
