"""Compiles the graphs of one group into a folder, with or without one binary for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.npu.qnn_session import QnnOptions, compile_graph


@dataclass(frozen=True, slots=True)
class ContextJob:
    """A graph to compile. `make` gives the bytes of the model when its turn comes."""

    name: str
    make: Callable[[], bytes]


def compile_contexts(
    group: Sequence[ContextJob],
    folder: Path,
    options: QnnOptions,
    weights_folder: Path,
    on_done: Callable[[str], None],
) -> None:
    """`<name>_ctx.onnx` in `folder` for every job, all with one shared binary if they are several.

    The binary beside the models has the first one's name. Raises like `compile_graph`, and leaves
    broken files behind then.
    """
    shared = len(group) > 1
    for job in group:
        path = folder / f"{job.name}_ctx.onnx"
        with _detour(folder / job.name, weights_folder) as weights:
            ends = shared and job is group[-1]
            compile_graph(job.make(), job.name, path, options, weights, shared, ends)
        on_done(job.name)


@contextmanager
def _detour(folder: Path, target: Path) -> Iterator[Path]:
    """The path of `target` by way of `folder`, which is there only meanwhile.

    The provider names a QNN graph after the path of its weights, as it is spelled, and after
    nothing else. The names must differ among the graphs of a context, and among all contexts that
    a process opens with shared weights: it would take one graph for another.
    """
    folder.mkdir()
    try:
        yield folder / os.path.relpath(target, folder)
    finally:
        folder.rmdir()
