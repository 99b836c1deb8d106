"""`hexlm explain`: says in words what bounds this machine, a benchmark or a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.cli.errors import CliError

if TYPE_CHECKING:
    from engine.roofline import Roofline
    from server.bench.explanation import Facts, Verdict


def explain(
    file: Annotated[
        Path | None, typer.Argument(help="What hexlm bench --out or hexlm trace wrote.")
    ] = None,
    machine: Annotated[
        bool, typer.Option("--machine", help="Measure what this machine can do at most.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="For --machine; as a server would have by default.")
    ] = None,
) -> None:
    """Say what bounds a benchmark or a trace, and which knob to turn."""
    if file is None and not machine:
        raise CliError("give a file of hexlm bench or hexlm trace, or --machine, or both")
    document = None if file is None else read_document(file)
    roofline = measure_machine(threads) if machine else None
    if file is None:
        return
    verdicts = explain_document(file, document, roofline)
    for verdict in verdicts:
        for line in verdict_lines(verdict):
            typer.echo(line)


def read_document(file: Path) -> object:
    try:
        document: object = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise CliError(f"{file} is not JSON: {error}") from error
    return document


def measure_machine(threads: int | None) -> Roofline:
    from engine.kernels.kernel_cache import default_folder, use_kernel_cache
    from engine.roofline import measure_roofline
    from server.bench.roofline_record import roofline_lines
    from server.machine import detect_threads

    use_kernel_cache(default_folder())
    roofline = measure_roofline(threads or detect_threads().value)
    for line in roofline_lines(roofline):
        typer.echo(line)
    return roofline


def explain_document(file: Path, document: object, roofline: Roofline | None) -> list[Verdict]:
    """Raises CliError when the file is neither."""
    from server.bench.explanation import explain as verdict_of
    from server.bench.results import FORMAT

    is_bench = isinstance(document, dict) and document.get("format") == FORMAT
    facts = (
        bench_file_facts(file, roofline) if is_bench else trace_file_facts(file, document, roofline)
    )
    if not facts:
        raise CliError(
            f"{file} has no figures of the suites prefill, decode, concurrency or arrivals"
        )
    return [verdict_of(each) for each in facts]


def bench_file_facts(file: Path, roofline: Roofline | None) -> list[Facts]:
    from server.bench.bench_facts import facts_of
    from server.bench.results import NotABenchFile, read_results
    from server.bench.roofline_record import recorded_roofline

    try:
        results = read_results(file)
    except NotABenchFile as error:
        raise CliError(str(error)) from error
    return facts_of(results, roofline or recorded_roofline(results.roofline))


def trace_file_facts(file: Path, document: object, roofline: Roofline | None) -> list[Facts]:
    from server.bench.trace_facts import trace_facts
    from server.bench.trace_file import NotATrace

    try:
        return trace_facts(document, roofline)
    except NotATrace as error:
        raise CliError(f"{file} is neither a benchmark nor a trace: {error}") from error


def verdict_lines(verdict: Verdict) -> list[str]:
    return [
        f"{verdict.what}: bound by {verdict.bound}",
        f"  {verdict.numbers}",
        f"  turn: {verdict.knob}",
    ]
