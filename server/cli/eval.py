"""`hexlm eval`: what a weight format or a KV format costs, on a text of the user's choice."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from server.cli.errors import CliError

if TYPE_CHECKING:
    from engine.bundle import Bundle
    from engine.evaluate.scoring import Figures, Scored
    from server.model_store import ModelStore
    from server.sources.progress import Progress

SAME = "same"
F32 = "f32"


def evaluate(
    model: Annotated[str, typer.Argument(help="The name or the folder of a model that is here.")],
    reference: Annotated[
        str,
        typer.Option(
            help="What to compare with: f32 (the model's file in float32), a model's name, "
            "or same (the model itself with f32 keys and values)."
        ),
    ] = F32,
    weights: Annotated[
        str | None,
        typer.Option(
            help="More models, comma-separated: names or folders, or the formats int8, int4, "
            "int4-awq and mixed, which are made for the occasion.",
            metavar="LIST",
        ),
    ] = None,
    kv: Annotated[
        str, typer.Option(help="KV formats, comma-separated: f32, int8, int8k4v, int4.")
    ] = "int8",
    text: Annotated[
        Path | None, typer.Option(help="The text to read (UTF-8). Default: one of ours.")
    ] = None,
    window: Annotated[int, typer.Option(min=16, help="Tokens that are read together.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=16, help="Tokens to read in all.")] = 4096,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: the cores.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Measure perplexity, and how far predictions are from a reference's."""
    from server.cli.list import table_console

    options = EvalOptions(reference, _split(weights), _split(kv), text, window, max_tokens)
    figures, num_tokens = run_evaluation(model, options, threads)
    if as_json:
        typer.echo(json.dumps({"num_tokens": num_tokens, "models": [*map(as_record, figures)]}))
        return
    console = table_console()
    console.print(figures_table(figures))
    console.print(legend(figures[0], num_tokens), markup=False, soft_wrap=True, highlight=False)


@dataclass(frozen=True, slots=True)
class EvalOptions:
    reference: str
    weights: tuple[str, ...]
    kv_formats: tuple[str, ...]
    text: Path | None
    window: int
    max_tokens: int


def _split(values: str | None) -> tuple[str, ...]:
    return tuple(value.strip() for value in (values or "").split(",") if value.strip())


def run_evaluation(
    model: str, options: EvalOptions, threads: int | None
) -> tuple[tuple[Figures, ...], int]:
    """The reference first; and the number of tokens that were read."""
    from engine.evaluate.scoring import ScoredBundle, compare
    from engine.kernels import kernel_cache
    from server.cli.progress import progress_bars
    from server.machine import detect_threads
    from server.model_store import ModelStore
    from server.token_windows import read_text, token_windows

    check_kv_formats(options.kv_formats)
    # What a format does to the keys is what is being measured: no warnings about it.
    logging.getLogger("engine.loader").setLevel(logging.ERROR)
    kernel_cache.use_kernel_cache(kernel_cache.default_folder())
    num_threads = threads or detect_threads().value
    with ExitStack() as stack:
        progress = stack.enter_context(progress_bars(Console(stderr=True)))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hexlm-eval-")))
        models = Models(ModelStore(), scratch, num_threads, progress)
        own = models.open(model)
        token_ids = token_windows(
            own.tokenizer_path.read_text("utf-8"),
            own.config,
            read_text(options.text),
            options.window,
            max(1, options.max_tokens // options.window),
        )
        reference = models.reference(own, options.reference)
        bundles = [own, *(models.other(own, name) for name in options.weights)]
        candidates: list[Scored] = [
            ScoredBundle(bundle.name, bundle, kv_format)
            for bundle in bundles
            for kv_format in options.kv_formats
        ]
        figures = compare(reference, candidates, token_ids, num_threads, progress)
    return figures, token_ids.size


def check_kv_formats(names: Sequence[str]) -> None:
    from engine.kv_format import KV_FORMATS

    for name in names:
        if name not in KV_FORMATS:
            raise CliError(f"unknown KV format {name!r}; use some of {', '.join(KV_FORMATS)}")


@dataclass(frozen=True, slots=True)
class Models:
    """Finds bundles by what the user calls them, and makes the ones that are formats."""

    store: ModelStore
    scratch: Path
    num_threads: int
    progress: Progress

    def open(self, name: str) -> Bundle:
        from server.model_source import find_bundle

        bundle = find_bundle(self.store, name)
        return bundle if bundle is not None else self.store.open(name)

    def reference(self, own: Bundle, name: str) -> Scored:
        from engine.evaluate.scoring import ScoredBundle, ScoredCheckpoint
        from server.model_source import open_decoder, source_of

        if name == SAME:
            return ScoredBundle(own.name, own, F32)
        if name != F32:
            bundle = self.open(name)
            return ScoredBundle(bundle.name, bundle, F32)
        checkpoint = open_decoder(source_of(own))
        return ScoredCheckpoint(own.name, checkpoint, own.summary.num_parameters)

    def other(self, own: Bundle, name: str) -> Bundle:
        from engine.quantize.settings import FORMATS

        return self._quantized(own, name) if name in FORMATS else self.open(name)

    def _quantized(self, own: Bundle, weight_format: str) -> Bundle:
        from engine.export.exporter import import_checkpoint
        from engine.quantize.model import QuantizingWriter
        from engine.quantize.settings import QuantizeSettings
        from server.cli.quantize import calibration_windows
        from server.model_source import open_decoder, source_of

        file = source_of(own)
        token_ids = calibration_windows(open_decoder(file), text=None)
        settings = QuantizeSettings(weight_format)
        work = self.scratch / f"{weight_format}-parts"
        writer = QuantizingWriter(settings, token_ids, work, self.num_threads)
        bundle = import_checkpoint(
            file,
            self.scratch / weight_format,
            weight_format,
            lambda done, total: self.progress(f"quantizing to {weight_format}", done, total),
            writer,
        )
        writer.finish()
        return bundle


def figures_table(figures: Sequence[Figures]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("model", no_wrap=True)
    for heading in ("weights", "MB", "KV", "KV bytes", "perplexity", "mean KL", "max KL", "top-1"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in figures:
        table.add_row(*figures_row(one))
    return table


def figures_row(one: Figures) -> tuple[str, ...]:
    divergence = one.divergence
    head = (
        one.label,
        one.weight_format,
        f"{one.num_weight_bytes / 1e6:,.1f}",
        one.kv_format,
        f"{one.kv_bytes_per_token:,}",
        f"{one.score.perplexity:.3f}",
    )
    if divergence is None:
        return (*head, "reference", "", "")
    return (
        *head,
        f"{divergence.mean_kl:.5f}",
        f"{divergence.largest_kl:.3f}",
        f"{divergence.top_1_agreement:.1%}",
    )


def legend(reference: Figures, num_tokens: int) -> str:
    return (
        f"{num_tokens:,} tokens; KL in nats and top-1 agreement are against {reference.label} with "
        f"{reference.weight_format} weights and {reference.kv_format} keys and values; KV bytes "
        "are per token"
    )


def as_record(one: Figures) -> dict[str, object]:
    divergence = one.divergence
    return {
        "model": one.label,
        "weights": one.weight_format,
        "weight_bytes": one.num_weight_bytes,
        "kv": one.kv_format,
        "kv_bytes_per_token": one.kv_bytes_per_token,
        "perplexity": one.score.perplexity,
        "mean_kl": None if divergence is None else divergence.mean_kl,
        "max_kl": None if divergence is None else divergence.largest_kl,
        "top_1_agreement": None if divergence is None else divergence.top_1_agreement,
    }
