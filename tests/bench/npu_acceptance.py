"""The acceptance table: what of a model's graphs the HTP takes, how exactly, and at what cost.

    python -m tests.bench.npu_acceptance                  every form of the tiny random model
    python -m tests.bench.npu_acceptance --model NAME     a model that is here; --parts, --buckets

Per graph, token bucket and chip: nodes on the HTP of all nodes, relative RMS of each output
against the CPU provider with fp32 activations on the same graph and input, size of the compiled
context by itself, and how long compiling takes. Needs the emulator. Exit code 1 when a node is
refused, with the provider's reason.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.npu.context_group import ContextJob, compile_contexts
from engine.npu.context_store import folder_bytes
from engine.npu.graphs import NpuGraphs
from engine.npu.qnn_session import (
    QnnOptions,
    assign,
    open_graph,
    run_once,
)
from server.model_store import ModelStore
from tests.engine.test_qnn_target import relative_rms, run_on_cpu
from tests.tiny_graphs import FORMS, write_weights

CHIPS = (60, 88)


@dataclass(frozen=True, slots=True)
class Subject:
    """A part of a model, for one number of tokens."""

    label: str
    name: str
    model: bytes
    num_tokens: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Row:
    subject: Subject
    soc_model: int
    num_on_htp: int
    num_nodes: int
    errors: dict[str, float]
    context_bytes: int
    compile_s: float
    refusals: tuple[tuple[str, str], ...]


def main() -> int:
    arguments = parse(sys.argv[1:])
    say("| graph | T | SoC | nodes on HTP | relative RMS | context | compiled in |")
    say("|---|---|---|---|---|---|---|")
    refused = 0
    with tempfile.TemporaryDirectory() as scratch:
        for subject in subjects(arguments, Path(scratch)):
            for soc_model in arguments.soc:
                row = measure(subject, soc_model)
                say(as_line(row))
                for node, reason in row.refusals:
                    say(f"  refused: {node}: {reason}")
                refused += row.num_nodes - row.num_on_htp
    return 1 if refused else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model of the cache instead of the tiny forms")
    parser.add_argument("--parts", nargs="*", help="such as segment_000 head; all by default")
    parser.add_argument("--buckets", nargs="*", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--soc", nargs="*", type=int, default=list(CHIPS))
    return parser.parse_args(arguments)


def subjects(arguments: argparse.Namespace, scratch: Path) -> Iterator[Subject]:
    for label, graphs, folder in models(arguments.model, scratch):
        for name in arguments.parts or graphs.names:
            for bucket in arguments.buckets:
                model = graphs.model(name, bucket)
                yield Subject(f"{label}: {name}", name, model, bucket, folder)


def models(name: str | None, scratch: Path) -> Iterator[tuple[str, NpuGraphs, Path]]:
    if name is not None:
        bundle = ModelStore().open(name)
        yield name, NpuGraphs.of(bundle.config, bundle.path), bundle.path
        return
    for label, form in FORMS.items():
        folder = scratch / label
        folder.mkdir()
        yield label, NpuGraphs(*write_weights(folder, form)), folder


def measure(subject: Subject, soc_model: int) -> Row:
    options = QnnOptions(soc_model, emulated=True)
    found = assign(subject.model, subject.name, options, subject.folder)
    if found.refusals:
        return Row(
            subject, soc_model, found.num_on_htp, found.num_nodes, {}, 0, 0.0, found.refusals
        )
    inputs, expected = run_on_cpu(subject.model, subject.folder)
    got = run_once(open_graph(subject.model, subject.name, options, subject.folder), inputs)
    errors = {name: relative_rms(got[name], values) for name, values in expected.items()}
    with tempfile.TemporaryDirectory() as out:
        began = time.process_time()
        job = ContextJob(subject.name, lambda: subject.model)
        compile_contexts([job], Path(out), options, subject.folder, lambda name: None)
        seconds = time.process_time() - began
        size = folder_bytes(Path(out))
    return Row(subject, soc_model, found.num_on_htp, found.num_nodes, errors, size, seconds, ())


def as_line(row: Row) -> str:
    errors = ", ".join(f"{name} {value:.1e}" for name, value in row.errors.items())
    cells = (
        row.subject.label,
        f"{row.subject.num_tokens}",
        f"{row.soc_model}",
        f"{row.num_on_htp} / {row.num_nodes}",
        errors,
        f"{row.context_bytes / 1000:,.0f} kB",
        f"{row.compile_s:.2f} s",
    )
    return f"| {' | '.join(cells)} |"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
