"""`hexlm bench`: measures a server and shows, writes and compares what came out.

Ends its own servers and writes what was measured also after Ctrl-C. Knows the terminal and the
files; what is measured and how is `server/bench`.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from server.cli.errors import CliError

if TYPE_CHECKING:
    from rich.table import Table

    from server.bench.comparison import Comparison
    from server.bench.report import TextTable
    from server.bench.results import Results
    from server.bench.run import Progress
    from server.bench.session import BenchSettings, Endpoint

PEER_NAME = "peer"
OWN_NAME = "hexlm"
URL_NAME = "server"


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where to write what, beside the terminal."""

    json: Path | None = None
    markdown: Path | None = None
    plots: Path | None = None


def bench(
    model: Annotated[
        str | None, typer.Argument(help="A model to serve and measure: a name, source or path.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Measure the OpenAI-compatible server at this URL instead.")
    ] = None,
    peer: Annotated[
        str | None, typer.Option(help="A second server, measured in turn with the first.")
    ] = None,
    suite: Annotated[
        list[str] | None, typer.Option(help="Only these suites; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Few, short cases and 2 rounds.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write everything as JSON.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Compare with an older --out file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables as Markdown.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Draw plots (PNG) into this folder.")] = None,
    rate: Annotated[
        list[float] | None, typer.Option(help="Arrivals per second; may be repeated.")
    ] = None,
    ttft_objective: Annotated[
        float, typer.Option(help="Seconds to the first text of a good answer.")
    ] = 2.0,
    itl_objective: Annotated[
        float, typer.Option(help="Seconds that 95 % of its gaps stay below.")
    ] = 0.15,
    max_length: Annotated[
        int | None, typer.Option(min=128, help="No prompt is longer, in tokens.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of all prompts and arrivals; a new one if not given.")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="The model's name at --url; its first one if not given.")
    ] = None,
    peer_model: Annotated[str | None, typer.Option(help="The model's name at --peer.")] = None,
    pid: Annotated[int | None, typer.Option(help="The process of --url, for its memory.")] = None,
    peer_pid: Annotated[int | None, typer.Option(help="The process of --peer.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent to the servers.")] = None,
    roofline: Annotated[
        bool, typer.Option(help="Measure the machine's limits before and after.")
    ] = True,
    device: Annotated[str | None, typer.Option(help="As for serve, with MODEL.")] = None,
    threads: Annotated[str | None, typer.Option(help="As for serve, with MODEL.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="As for serve, with MODEL.")] = None,
    kv_format: Annotated[str | None, typer.Option(help="As for serve, with MODEL.")] = None,
    max_model_len: Annotated[str | None, typer.Option(help="As for serve, with MODEL.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="As for serve, with MODEL: a TOML file.")
    ] = None,
) -> None:
    """Measure a server: latency, throughput, memory, serving under load."""
    from server.bench.session import BenchSettings
    from server.bench.timing import Objectives

    serve_options = {
        "device": device,
        "threads": threads,
        "kv-memory": kv_memory,
        "kv-format": kv_format,
        "max-model-len": max_model_len,
        "config": None if config is None else str(config),
    }
    given = [name for name, value in serve_options.items() if value is not None]
    if (model is None) == (url is None):
        raise CliError("give either MODEL, to serve and measure it, or --url")
    if url is not None and given:
        raise CliError(f"--{given[0]} is for a server that is started; with --url there is none")
    check_before(suite or [], plots)
    older = read_older(compare)
    if url is not None:
        own = endpoint_of(URL_NAME, url, served_model, pid, api_key)
    else:
        assert model is not None
        recorded = configuration(config, serve_options)
        options = [f"--{name}={value}" for name, value in serve_options.items() if value]
        own = own_endpoint(model, options, api_key, recorded)
    others = [endpoint_of(PEER_NAME, peer, peer_model, peer_pid, api_key)] if peer else []
    settings = BenchSettings(
        endpoints=(own, *others),
        suites=tuple(suite or ()),
        rounds=min(rounds, 2) if quick else rounds,
        is_quick=quick,
        seed=new_seed() if seed is None else seed,
        rates=tuple(rate or (1.0, 2.0, 4.0)),
        objectives=Objectives(ttft_objective, itl_objective),
        roofline_threads=roofline_threads(threads) if roofline else 0,
        max_length=max_length,
    )
    run_and_report(settings, Outputs(out, markdown, plots), older)


def new_seed() -> int:
    """Another one in each run, or a server that is still up would have its prompts cached."""
    return secrets.randbelow(1_000_000)


def check_before(suites: list[str], plots: Path | None) -> None:
    """What would only fail after a long run. Raises CliError."""
    from server.bench.errors import BenchError
    from server.bench.plots import check_matplotlib
    from server.bench.suites.table import SUITES

    if unknown := [name for name in suites if name not in SUITES]:
        raise CliError(f"there is no suite {unknown[0]!r}; the suites are {', '.join(SUITES)}")
    if plots is not None:
        try:
            check_matplotlib()
        except BenchError as error:
            raise CliError(str(error)) from error


def read_older(path: Path | None) -> Results | None:
    from server.bench.results import NotABenchFile, read_results

    if path is None:
        return None
    try:
        return read_results(path)
    except NotABenchFile as error:
        raise CliError(str(error)) from error


def endpoint_of(
    name: str, url: str, model: str | None, pid: int | None, api_key: str | None
) -> Endpoint:
    from server.bench.session import Endpoint

    if not url.startswith(("http://", "https://")):
        raise CliError(f"{url} is no URL; give one such as http://127.0.0.1:8000")
    return Endpoint(name, url, model, pid, api_key)


def configuration(file: Path | None, options: Mapping[str, str | None]) -> dict[str, Any]:
    """What is recorded of the server's settings. Raises ConfigError before anything is started."""
    from server.config import load_config

    flags = {name.replace("-", "_"): value for name, value in options.items() if name != "config"}
    settings = load_config(file, flags)
    recorded: dict[str, Any] = asdict(settings.scheduler)
    return recorded | {"speculation": settings.speculation.method}


def own_endpoint(
    model: str, options: list[str], api_key: str | None, recorded: Mapping[str, Any]
) -> Endpoint:
    """The model fetched and imported, if need be, before a server is started for it."""
    from engine.bundle import Bundle
    from engine.manifest import ModelKind
    from server.bench.model_cost import find_cost
    from server.bench.session import Endpoint
    from server.cli.progress import progress_bars
    from server.model_store import ModelStore

    with progress_bars(Console(stderr=True)) as report:
        bundle = Bundle.open(ModelStore().resolve(model, report))
    if bundle.kind is not ModelKind.GENERATION:
        raise CliError(
            f"{bundle.name} is an embedding model; bench measures models that write text"
        )
    return Endpoint(
        OWN_NAME,
        model=bundle.name,
        api_key=api_key,
        serve_options=(f"--model={bundle.path}", *options),
        cost=find_cost(bundle),
        configuration=recorded,
    )


def roofline_threads(threads: str | None) -> int:
    """As many as the server's engine has, so that its limit is measured and not another."""
    from server.machine import detect_threads

    return int(threads) if threads and threads.isdecimal() else detect_threads().value


def run_and_report(settings: BenchSettings, outputs: Outputs, older: Results | None) -> None:
    """Raises CliError for a failed server, KeyboardInterrupt after Ctrl-C; both after reporting."""
    from engine.kernels.kernel_cache import default_folder, use_kernel_cache
    from server.bench.comparison import compare
    from server.bench.errors import BenchError
    from server.bench.session import new_results, run_bench
    from server.cli.serve import interrupted_by_sigterm

    if settings.roofline_threads:
        use_kernel_cache(default_folder())
    results = new_results(settings)
    failure: BaseException | None = None
    with interrupted_by_sigterm(), bench_progress(Console(stderr=True)) as progress:
        try:
            run_bench(settings, results, progress)
        except (BenchError, KeyboardInterrupt) as error:
            failure = error
    comparison = compare(older, results) if older else None
    if results.figures:
        show_results(results, comparison)
        write_outputs(results, comparison, outputs)
    if isinstance(failure, BenchError):
        raise CliError(str(failure)) from failure
    if failure is not None:
        raise failure
    if lost := [note for note in results.notes if not note.suite]:
        raise CliError(f"{lost[0].target} was {lost[0].reason}")


@contextlib.contextmanager
def bench_progress(console: Console) -> Iterator[Progress]:
    """One bar over all rounds of all cases, with the case's name; silent when no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task("starting", total=None)

        def report(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total or None)

        yield report


def show_results(results: Results, comparison: Comparison | None) -> None:
    from server.bench.report import comparison_table, fact_lines, suite_tables
    from server.cli.list import table_console

    console = table_console()
    for table in suite_tables(results):
        console.print(drawn(table))
    if comparison is not None:
        console.print(drawn(comparison_table(comparison)))
        for line in comparison.differences:
            console.print(line, markup=False, highlight=False)
    for line in fact_lines(results):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def drawn(table: TextTable) -> Table:
    from rich.table import Table

    shown = Table(title=escape(table.title), title_justify="left")
    for column in table.columns:
        shown.add_column(escape(column))
    for row in table.rows:
        shown.add_row(*map(escape, row))
    return shown


def write_outputs(results: Results, comparison: Comparison | None, outputs: Outputs) -> None:
    """Raises OSError."""
    from server.bench.plots import draw, plots_of
    from server.bench.report import to_markdown
    from server.bench.results import to_json

    if outputs.json is not None:
        outputs.json.write_text(to_json(results), encoding="utf-8")
    if outputs.markdown is not None:
        outputs.markdown.write_text(to_markdown(results, comparison), encoding="utf-8")
    if outputs.plots is not None:
        draw(plots_of(results), outputs.plots)
