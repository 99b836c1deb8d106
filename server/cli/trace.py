"""The verb `trace`: records steps of a running server into a file for Perfetto, and sums them up.

Knows the terminal and the files; the server records, and what a trace says is `server/bench`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.cli.errors import CliError

if TYPE_CHECKING:
    from server.bench.trace_file import TraceFile

_HEAD_START_S = 0.3
"""For the trace to begin before the prompt's first step."""

_JOIN_S = 2.0


def trace(
    url: Annotated[
        str, typer.Option(help="The server; started with --debug.")
    ] = "http://127.0.0.1:8000",
    steps: Annotated[int, typer.Option(min=1, max=1000, help="How many steps to record.")] = 50,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=600.0, help="Seconds after which fewer will do.")
    ] = 30.0,
    out: Annotated[Path, typer.Option(help="The file, for Perfetto.")] = Path("trace.json"),
    prompt: Annotated[
        str | None, typer.Option(help="Ask this meanwhile, so that there are steps to see.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw a picture of typical steps.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the server's first.")] = None,
    api_key: Annotated[str | None, typer.Option(help="If the server wants one.")] = None,
) -> None:
    """Record what the next steps of a running server do, and when."""
    from server.cli.chat_client import ChatClient

    check_before(png)
    with (
        closing(ChatClient(url, api_key)) as client,
        asking(Question(url, api_key, model, prompt, max(16, steps))) as failures,
    ):
        document = client.trace(steps, timeout, model)
    if failures:
        raise failures[0]
    recorded = read_recorded(document, url, timeout)
    out.write_bytes(document)
    report(recorded, out, steps)
    if png is not None:
        draw(recorded, png)


def check_before(png: Path | None) -> None:
    """Raises CliError for what would only fail after the recording."""
    if png is None:
        return
    from server.bench.errors import BenchError
    from server.bench.plots import check_matplotlib

    try:
        check_matplotlib()
    except BenchError as error:
        raise CliError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Question:
    """`prompt` None: nothing is asked."""

    url: str
    api_key: str | None
    model: str | None
    prompt: str | None
    max_tokens: int


@contextmanager
def asking(question: Question) -> Iterator[list[CliError]]:
    """Asks again and again in another thread, since an answer may be shorter than the trace.

    The list gets the failure, if there is one.
    """
    failures: list[CliError] = []
    if question.prompt is None:
        yield failures
        return
    stop = threading.Event()
    thread = threading.Thread(target=_ask, args=(question, stop, failures), daemon=True)
    thread.start()
    try:
        yield failures
    finally:
        stop.set()
        thread.join(_JOIN_S)


def _ask(question: Question, stop: threading.Event, failures: list[CliError]) -> None:
    from server.cli.chat_client import ChatClient, ChatOptions

    stop.wait(_HEAD_START_S)
    try:
        with closing(ChatClient(question.url, question.api_key)) as client:
            name = question.model or next(iter(client.models()), "")
            options = ChatOptions(name, temperature=0.0, max_tokens=question.max_tokens)
            messages = [{"role": "user", "content": question.prompt or ""}]
            while not stop.is_set():
                with closing(client.stream(messages, options)) as pieces:
                    for _ in pieces:
                        if stop.is_set():
                            break
    except CliError as error:
        failures.append(error)


def read_recorded(document: bytes, url: str, timeout_s: float) -> TraceFile:
    """Raises CliError where nothing was recorded, or what answers is no hexlm."""
    from server.bench.trace_file import NotATrace, read_trace

    try:
        content = json.loads(document)
    except ValueError as error:
        raise CliError(f"what answers at {url} is not hexlm: its trace is not JSON") from error
    if isinstance(content, dict) and content.get("traceEvents") == []:
        raise CliError(
            f"no step was computed within {timeout_s:g} s: send requests while it records, or "
            "give one with --prompt"
        )
    try:
        return read_trace(content)
    except NotATrace as error:
        raise CliError(f"what answers at {url} is not hexlm: {error}") from error


def report(recorded: TraceFile, out: Path, num_wanted: int) -> None:
    from server.bench.trace_summary import summary_table
    from server.cli.bench import drawn
    from server.cli.list import table_console
    from server.machine import format_bytes

    table_console().print(drawn(summary_table(recorded)))
    if len(recorded.steps) < num_wanted:
        typer.echo(f"{len(recorded.steps)} of {num_wanted} steps: there were no more in time")
    typer.echo(
        f"{out} ({format_bytes(out.stat().st_size)}): open it at https://ui.perfetto.dev or in "
        f"chrome://tracing\nhexlm explain {out}  says what bounds these steps"
    )


def draw(recorded: TraceFile, png: Path) -> None:
    from server.bench.trace_plot import draw_trace

    draw_trace(recorded, png)
    typer.echo(f"{png}: a picture of typical steps")
