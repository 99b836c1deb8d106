"""`hexlm calibrate`: measures a model on each lane of this machine, keeps it and shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table

from server.cli.list import table_console

if TYPE_CHECKING:
    from engine.calibration import Calibration
    from engine.cost_profile import CostProfile, LaneCosts


def calibrate(
    model: Annotated[str, typer.Argument(help="The name of a model that is here.")],
    config: Annotated[
        Path | None, typer.Option("--config", help="A configuration file, as for `hexlm serve`.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, npu or npu-emulated, as it will be served.")
    ] = None,
    threads: Annotated[str | None, typer.Option(help="Threads, as it will be served.")] = None,
    kv_format: Annotated[
        str | None, typer.Option("--kv-format", help="As it will be served.")
    ] = None,
) -> None:
    """Measure what a model costs on each device, so that every step goes where it is fastest."""
    from engine.calibration import calibrate as measure
    from server.config import load_config
    from server.engine_entry import engine_config
    from server.loadable_model import engine_spec
    from server.model_store import ModelStore

    flags = {"device": device, "threads": threads, "kv_format": kv_format}
    settings = load_config(config, flags)
    bundle = ModelStore().open(model)
    progress = Console(stderr=True)
    with progress.status("calibrating") as status:
        found = measure(engine_config(engine_spec(bundle.path, settings)), status.update)
    table_console().print(report(found))


def report(found: Calibration) -> RenderableType:
    """All that was measured, and what follows from it."""
    from engine.placement import lane_table

    profile, device = found.profile, found.placement.device
    parts: list[RenderableType] = [
        f"device: {device} ({found.placement.reason})",
        steps_table(profile),
        *(lane_report(name, costs) for name, costs in profile.lanes.items()),
        attention_table(profile),
        f"copies between lanes: {profile.copy_bytes_per_s / 1e9:.1f} GB/s; from thread to thread: "
        f"{profile.handover_s * 1e6:.0f} us",
        *(f"not measured: {what}" for what in found.skipped),
    ]
    if found.placement.wants_npu:
        parts.append(f"plan: {lane_table(profile, device).reason}")
    else:
        parts.append("plan: everything on the cpu")
    parts.append(f"kept in {found.path}")
    return Group(*parts)


def steps_table(profile: CostProfile) -> Table:
    table = Table("tokens", "step on the cpu", "with a row for each", title="whole steps")
    for tokens, seconds in profile.cpu_step:
        table.add_row(str(tokens), _ms(seconds), _ms(profile.cpu_step_s(tokens, tokens)))
    for name, costs in profile.whole.items():
        for tokens, context_len, seconds in costs.steps:
            table.add_row(f"{tokens}, {name}, context {context_len}", _ms(seconds), "")
    return table


def lane_report(name: str, costs: LaneCosts) -> Table:
    from engine.cost_profile import KINDS

    title = f"segments on {name} (an empty call: {costs.call_overhead_s * 1e6:.0f} us)"
    table = Table("rows", *KINDS, title=title)
    for rows in sorted({n for points in costs.segments.values() for n, _ in points}):
        table.add_row(str(rows), *_row(costs, rows))
    return table


def _row(costs: LaneCosts, rows: int) -> Iterator[str]:
    from engine.cost_profile import KINDS

    for kind in KINDS:
        measured = dict(costs.segments[kind])
        yield _ms(measured[rows]) if rows in measured else ""


def attention_table(profile: CostProfile) -> Table:
    title = "attention of one layer, a token"
    table = Table("context", "decode", "in a chunk", title=title)
    chunks = dict(profile.chunk_attention)
    for context_len, seconds in profile.decode_attention:
        table.add_row(str(context_len), _ms(seconds), _ms(chunks[context_len]))
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
