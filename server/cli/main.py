"""The `hexlm` command: registers the verbs, and turns whatever they raise into one line.

Each verb is a plain function in a module of its own, which imports what is heavy only when it
runs, so that `hexlm --help` is quick. Knows no verb's arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from engine.version import own_version
from server.cli.bench import bench
from server.cli.calibrate import calibrate
from server.cli.chat import chat
from server.cli.compile import compile_model
from server.cli.doctor import doctor
from server.cli.errors import translate
from server.cli.eval import evaluate
from server.cli.explain import explain
from server.cli.list import list_models
from server.cli.npu_report import npu_report
from server.cli.pull import pull
from server.cli.quantize import quantize
from server.cli.rm import rm
from server.cli.serve import serve
from server.cli.show import show
from server.cli.synthesize import synthesize
from server.cli.trace import trace


def create_app() -> typer.Typer:
    app = typer.Typer(
        name="hexlm",
        help="OpenAI-compatible LLM server for Snapdragon PCs and for any other machine's CPU.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(options)
    app.command("serve")(serve)
    app.command("chat")(chat)
    app.command("pull")(pull)
    app.command("list")(list_models)
    app.command("show")(show)
    app.command("rm")(rm)
    app.command("bench")(bench)
    app.command("explain")(explain)
    app.command("trace")(trace)
    app.command("quantize")(quantize)
    app.command("eval")(evaluate)
    app.command("synthesize")(synthesize)
    app.command("compile")(compile_model)
    app.command("calibrate")(calibrate)
    app.command("doctor")(doctor)
    app.command("npu-report")(npu_report)
    return app


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hexlm {own_version()}")
        raise typer.Exit


def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """What comes before the verb."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code. Raises nothing but SystemExit."""
    try:
        code = create_app()(args=arguments, prog_name="hexlm", standalone_mode=False)
    except SystemExit:
        raise
    except BaseException as exc:
        failure = translate(exc)
        if failure.message is not None:
            console = Console(stderr=True, highlight=False)
            console.print(f"hexlm: {failure.message}", markup=False, soft_wrap=True)
        return failure.exit_code
    return code if isinstance(code, int) else 0


def main() -> None:
    sys.exit(run())


if __name__ == "__main__":
    main()
