"""`hexlm list`: the models that are here, and the names that `pull` knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from server.model_store import StoredModel

PIPE_WIDTH = 240


def list_models() -> None:
    """List the models in the cache and the ones that can be pulled by name."""
    from server.model_catalog import read_catalog
    from server.model_store import ModelStore

    console = table_console()
    models = ModelStore().list()
    if models:
        console.print(models_table(models))
    here = {model.name for model in models}
    for entry in read_catalog():
        if entry.name not in here:
            console.print(
                f"not here yet: {entry.name} ({entry.description}, {entry.licence}, "
                f"{entry.size_bytes / 1e6:,.0f} MB); run `hexlm pull {entry.name}`",
                markup=False,
                soft_wrap=True,
            )


def table_console() -> Console:
    """Of the terminal's width; wide enough for paths when the output goes to a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def models_table(models: tuple[StoredModel, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "kind", "size", "quantization", "architecture", "context", "path"):
        justify: Literal["left", "right"] = "right" if heading in ("size", "context") else "left"
        table.add_column(heading, justify=justify, no_wrap=heading != "path", overflow="fold")
    for model in models:
        table.add_row(*map(escape, model_row(model)))
    return table


def model_row(model: StoredModel) -> tuple[str, ...]:
    """A damaged bundle shows what is wrong with it in place of its numbers."""
    bundle = model.bundle
    if bundle is None:
        return (model.name, "", "damaged", "", "", "", model.problem or "")
    quantization = f"{bundle.summary.quantization} → {bundle.weight_format}"
    return (
        model.name,
        str(bundle.kind),
        f"{bundle.num_bytes / 1e6:,.1f} MB",
        quantization,
        bundle.manifest.config.architecture,
        f"{bundle.manifest.config.context_length:,}",
        str(model.path),
    )
