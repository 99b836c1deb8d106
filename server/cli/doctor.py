"""`hexlm doctor`: looks at the machine and says what is well, what is not, and how to mend it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from server.doctor.facts import Facts
    from server.doctor.findings import Finding

STYLES = {"ok": "green", "info": "cyan", "warning": "yellow", "problem": "bold red"}


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Facts and findings as one JSON object.")
    ] = False,
    host: Annotated[str | None, typer.Option(help="Address that will be served on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port that will be served on.")] = None,
    config: Annotated[Path | None, typer.Option(help="The TOML file of `hexlm serve`.")] = None,
) -> None:
    """Check chip, drivers, versions, memory, contexts, folders and ports; says how to mend it."""
    from server.cli.errors import CliError
    from server.config import load_config
    from server.doctor.findings import examine, has_problem
    from server.model_store import ModelStore

    try:
        from server.doctor.probes import read_facts
    except ImportError as error:
        raise CliError(
            f"a library cannot be loaded ({error}); reinstall hexlm, and on Windows the Visual C++ "
            "Redistributable for this Python's architecture"
        ) from error
    settings = load_config(config, {"host": host, "port": port}).server
    facts = read_facts(ModelStore(), settings.host, settings.port)
    findings = examine(facts)
    if as_json:
        typer.echo(as_document(facts, findings))
    else:
        show(findings)
    if has_problem(findings):
        raise typer.Exit(1)


def as_document(facts: Facts, findings: tuple[Finding, ...]) -> str:
    from server.doctor.findings import has_problem

    document = {
        "ok": not has_problem(findings),
        "findings": [asdict(finding) for finding in findings],
        "facts": asdict(facts),
    }
    return json.dumps(document, indent=1)


def show(findings: tuple[Finding, ...]) -> None:
    console = Console(highlight=False)
    for finding in findings:
        line = Text(f"{finding.level:<8} ", STYLES[finding.level])
        line.append(f"{finding.topic}: {finding.message}", "default")
        console.print(line, soft_wrap=True)
        if finding.fix:
            console.print(f"         fix: {finding.fix}", markup=False, soft_wrap=True)
