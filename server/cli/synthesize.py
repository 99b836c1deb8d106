"""`hexlm synthesize`: a model of true shapes and random weights, to measure what it would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from server.cli.errors import CliError

if TYPE_CHECKING:
    from engine.synthetic.checkpoint import SyntheticCheckpoint


def synthesize(
    like: Annotated[str, typer.Option(help="phi-3-mini, qwen2-7b, llama-3-8b or qwen2-13b-class.")],
    quant: Annotated[str, typer.Option(help="int4 or int8.")] = "int4",
    out: Annotated[
        str | None,
        typer.Option(help="The new model's name, or the path of a folder. Default: by its shape."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Fewer layers than the real model has.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Write a random model of the true shapes of a large one. Its text is noise."""
    from engine.export.exporter import decoder_writer, write_bundle
    from engine.export.measured_width import with_measured_width
    from engine.manifest import BundleSource
    from server.cli.progress import progress_bars
    from server.cli.quantize import destination
    from server.machine import available_memory_bytes, detect_threads
    from server.model_store import ModelStore

    checkpoint = synthetic(like, quant, layers)
    folder = destination(out or f"{like}-{quant}-synthetic", ModelStore().models_dir)
    if folder.exists() and not force:
        raise CliError(f"{folder} is there; choose another name, or replace it with --force")
    console, write = Console(stderr=True), decoder_writer("auto", checkpoint.pack)
    with progress_bars(console) as progress:
        bundle = write_bundle(
            checkpoint,
            BundleSource(path="synthetic", num_bytes=0, modified_ns=0, sha256=checkpoint.digest),
            folder,
            folder.name,
            lambda done, total: progress("synthesize", done, total),
            with_measured_width(write, detect_threads().value, available_memory_bytes()),
        )
    size = (
        f"{bundle.summary.num_parameters / 1e9:.2f} B parameters, {bundle.num_bytes / 1e9:,.2f} GB"
    )
    console.print(f"{bundle.name} is ready ({size}) in {bundle.path}", markup=False, soft_wrap=True)


def synthetic(like: str, quant: str, num_layers: int | None) -> SyntheticCheckpoint:
    """Raises CliError for what is not known."""
    from engine.synthetic.checkpoint import SyntheticCheckpoint
    from engine.synthetic.shapes import SHAPES

    shape, bits = SHAPES.get(like), {"int4": 4, "int8": 8}.get(quant)
    if shape is None:
        raise CliError(f"unknown shape {like!r}; use one of {', '.join(SHAPES)}")
    if bits is None:
        raise CliError(f"unknown format {quant!r}; use int4 or int8")
    return SyntheticCheckpoint(shape.config(num_layers), shape.title, bits)
