"""`hexlm npu-report`: everything that only a machine with an NPU can tell, in one file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table

from server.cli.list import table_console

if TYPE_CHECKING:
    from engine.npu.report import ReportPlan

PUBLIC_FIGURES = (
    ("Llama 3.2 1B", "Genie, X2 Elite, w4a16, context 4096", 90.4, 0.050),
    ("Llama 3.2 3B", "Genie, X2 Elite, w4a16, context 4096", 42.8, 0.075),
    ("Llama 3.1 8B", "Genie, X2 Elite, w4a16, context 4096", 21.0, 0.130),
    ("Qwen2.5 7B", "Foundry Local, X2 Elite", 13.1, None),
    ("Qwen3 4B", "GenieX (llama.cpp), X Elite, burst", 9.21, 0.986),
)
"""(model, what ran it, tokens a second of one sequence, seconds to the first token); by others."""


def npu_report(
    model: Annotated[str, typer.Argument(help="The name of a model that is here.")],
    out: Annotated[
        Path, typer.Option("--out", help="The file to write.", metavar="FILE.json")
    ] = Path("npu-report.json"),
    config: Annotated[
        Path | None, typer.Option("--config", help="A configuration file, as for `hexlm serve`.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="npu; cpu and npu-emulated show what the report would hold.")
    ] = "npu",
    threads: Annotated[str | None, typer.Option(help="Threads, as it will be served.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Of steady decoding, to see whether it slows down.")
    ] = None,
    short: Annotated[
        bool, typer.Option("--short", help="A few sizes, once each: only proves that it works.")
    ] = False,
) -> None:
    """Measure a model on this machine's NPU in every way, and write it all to one file."""
    from engine.npu.report import make_report
    from server.config import load_config
    from server.engine_entry import engine_config
    from server.loadable_model import engine_spec
    from server.model_store import ModelStore

    check_writable(out)
    settings = load_config(config, {"device": device, "threads": threads})
    bundle = ModelStore().open(model)
    with Console(stderr=True).status("measuring") as status:
        document = make_report(
            engine_config(engine_spec(bundle.path, settings)),
            plan_of(short, minutes),
            status.update,
            partial(write, out),
        )
    write(out, document)
    table_console().print(summary(document))
    Console(stderr=True).print(f"written to {out}", markup=False, soft_wrap=True)


def write(out: Path, document: dict[str, Any]) -> None:
    """Adds what others measured. Raises OSError."""
    document["public_figures"] = [
        dict(zip(("model", "by", "tokens_per_s", "first_token_s"), figure, strict=True))
        for figure in PUBLIC_FIGURES
    ]
    out.write_text(json.dumps(document, indent=1), "utf-8")


def check_writable(out: Path) -> None:
    """Before anything is measured. Raises OSError."""
    with out.open("a"):
        pass


def plan_of(short: bool, minutes: float | None) -> ReportPlan:
    from engine.npu.report import SHORT, ReportPlan

    plan = SHORT if short else ReportPlan()
    return plan if minutes is None else replace(plan, load_s=60 * minutes)


def summary(document: dict[str, Any]) -> RenderableType:
    """The numbers that matter most; all of them are in the file."""
    return Group(*_parts(document))


def _parts(document: dict[str, Any]) -> Iterator[RenderableType]:
    if document["is_emulated"]:
        yield "EMULATED: the emulator models no speed; these numbers say nothing about a chip"
    device = document["device"]
    yield f"device: {device['name']} ({device['reason']})"
    for name, seconds in document["call_floor_s"].items():
        yield f"a call that computes nothing, on {name}: {seconds * 1e6:.0f} us"
    if "copies" in document:
        yield _table("copies", document["copies"], ("memory", "num_bytes", "seconds"))
    columns = ("form", "num_sequences", "context_len", "tokens_per_s", "seconds")
    yield _table("decodes", document["decodes"], columns)
    yield _table("prompts", document["prompts"], ("form", "num_tokens", "tokens_per_s", "seconds"))
    if document.get("perf_modes"):
        yield _table("power modes", document["perf_modes"], ("perf_mode", "tokens_per_s"))
    if document.get("load"):
        yield _table("steady load", document["load"], ("at_s", "calls_per_s", "cpu_percent"))
    for form, found in document["crossover"].items():
        yield (
            f"{form} is faster than the cpu from {found.get('num_sequences') or 'no number of'} "
            f"sequences and {found.get('num_tokens') or 'no number of'} prompt tokens on"
        )
    if "plan_in_words" in document:
        yield f"plan: {document['plan_in_words']}"
    yield from (f"not measured: {what}" for what in document["skipped"])
    figures = ("model", "by", "tokens_per_s", "first_token_s")
    yield _table("beside others' public figures", document["public_figures"], figures)


def _table(title: str, entries: list[dict[str, Any]], columns: tuple[str, ...]) -> Table:
    table = Table(*columns, title=title)
    for entry in entries:
        table.add_row(*(_text(entry[column]) for column in columns))
    return table


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
