"""The process that compiles: reads what to compile from stdin, tells on stdout how it goes.

A process of its own, because a crash in the provider must not be the engine's, and because what
it takes in memory is given back. It ends when its stdin is closed: it never outlives who started
it. stdin: one line of JSON, an encoded `CompileTask`. stdout: one line of JSON per event.

    {"event": "graph", "graph": …}      this graph is compiled next
    {"event": "compiled", "graph": …, "seconds": …}
    {"event": "group", "group": …, "num_bytes": …}    published
    {"event": "failed", "message": …}   nothing more comes
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

import psutil

from engine.bundle import Bundle
from engine.errors import EngineError
from engine.npu.compile_task import CompileTask, decode_task
from engine.npu.context_group import ContextJob, compile_contexts
from engine.npu.context_store import ContextStore
from engine.npu.fused_graphs import fused_model, is_fused
from engine.npu.graphs import NpuGraphs
from engine.npu.qnn_session import QnnOptions
from engine.npu.recipe import ContextGroup, GraphId

Event = dict[str, str | float]
Tell = Callable[[Event], None]


def main() -> None:
    stdout = _claim_stdout()
    tell = _teller(stdout)
    task = decode_task(sys.stdin.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    if task.background:
        psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS if sys.platform == "win32" else 10)
    try:
        compile_task(task, tell)
    except EngineError as error:
        tell({"event": "failed", "message": str(error)})
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        tell({"event": "failed", "message": f"{error.strerror or error}{where}"})
    stdout.close()
    os._exit(0)  # nothing is left to be done, and the provider's own end may crash


def compile_task(task: CompileTask, tell: Tell) -> None:
    """Raises DeviceError, CompileFailed, BundleError or OSError."""
    bundle = Bundle.open(task.bundle)
    store = ContextStore(bundle, task.recipe, task.groups)
    graphs = NpuGraphs.of(bundle.config, bundle.path)
    options = QnnOptions(task.recipe.soc_model, provider_options=dict(task.recipe.options))
    for group in task.groups:
        folder = store.partial_folder(group)
        for jobs in _shared_jobs(group, graphs, task.recipe.shared, tell):
            compile_contexts(jobs, folder, options, bundle.path, _on_done(tell))
        num_bytes = store.publish(group, folder)
        tell({"event": "group", "group": group.name, "num_bytes": num_bytes})


def make_model(graphs: NpuGraphs, graph: GraphId) -> bytes:
    if is_fused(graph.part):
        return fused_model(graphs, graph)
    return graphs.model(graph.part, graph.num_tokens)


def _shared_jobs(
    group: ContextGroup, graphs: NpuGraphs, shared: bool, tell: Tell
) -> list[list[ContextJob]]:
    """Each list makes one binary."""

    def job(graph: GraphId) -> ContextJob:
        def make() -> bytes:
            tell({"event": "graph", "graph": graph.name})
            return make_model(graphs, graph)

        return ContextJob(graph.name, make)

    jobs = [job(graph) for graph in group.graphs]
    return [jobs] if shared else [[job] for job in jobs]


def _on_done(tell: Tell) -> Callable[[str], None]:
    began = time.monotonic()

    def on_done(name: str) -> None:
        nonlocal began
        seconds = round(time.monotonic() - began, 3)
        tell({"event": "compiled", "graph": name, "seconds": seconds})
        began = time.monotonic()

    return on_done


def _claim_stdout() -> TextIO:
    """stdout for us alone: what native libraries print goes to stderr from here on."""
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return ours


def _teller(stream: TextIO) -> Tell:
    def tell(event: Event) -> None:
        stream.write(json.dumps(event) + "\n")

    return tell


def _end_with_stdin() -> None:
    """The other end is closed by will or by death."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
