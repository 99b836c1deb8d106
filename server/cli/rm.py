"""`hexlm rm`: deletes a model and what was downloaded for it, after asking."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from server.cli.errors import CliError


def rm(
    model: Annotated[str, typer.Argument(help="The name of a model that is here.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a model from the cache."""
    from server.model_store import ModelStore

    store = ModelStore()
    folder = store.find(model)
    if not yes and not is_confirmed(f"delete {folder}?"):
        raise CliError(f"{model} was kept; give --yes to delete it without a question")
    console = Console(stderr=True)
    console.print(f"deleted {store.remove(model)}", markup=False, soft_wrap=True)


def is_confirmed(question: str) -> bool:
    """No, also when there is nobody to ask (end of input)."""
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        return False
