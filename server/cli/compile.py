"""`hexlm compile`: makes a model's contexts for an NPU, this machine's or another's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from engine.npu.compiler import CompileReport
    from engine.npu.context_store import ContextStore
    from engine.npu.device_config import DeviceConfig


def compile_model(
    model: Annotated[str, typer.Argument(help="The name of a model that is here.")],
    soc: Annotated[
        int | None,
        typer.Option(
            "--soc",
            help="The chip's number: 60 is the X Elite, 88 the X2 Elite. Default: this machine's.",
            metavar="NUMBER",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", help="A device's name or .toml file instead of --soc.", metavar="DEVICE"
        ),
    ] = None,
    buckets: Annotated[
        str | None,
        typer.Option(
            "--buckets", help="Token buckets instead of the device's.", metavar="1,8,32,128"
        ),
    ] = None,
    fused: Annotated[
        bool, typer.Option("--fused", help="The form with the attention inside, too.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Compile everything again, also what is valid.")
    ] = False,
) -> None:
    """Compile a model for an NPU ahead of time, on any x86-64 Linux or on the machine itself."""
    from engine.npu.compiler import compile_missing
    from engine.npu.device_contexts import context_store
    from server.cli.progress import progress_bars
    from server.model_store import ModelStore

    target = with_buckets(choose_target(soc, device), buckets)
    store = context_store(ModelStore().open(model), target, fused)
    console = Console(stderr=True)
    with progress_bars(console) as report:
        done = compile_missing(
            store, lambda done, total, graph: report("compile", done, total), again=force
        )
    for line in describe(store, done, target.description):
        console.print(line, markup=False, soft_wrap=True)


def choose_target(soc: int | None, device: str | None) -> DeviceConfig:
    """Raises CliError or DeviceUnavailable."""
    from engine.errors import DeviceUnavailable
    from engine.npu.device_config import choose_device, load_device, packaged_devices
    from engine.npu.reported_chip import reported_chip
    from server.cli.errors import CliError

    if soc is not None and device is not None:
        raise CliError("give --soc or --device, not both")
    if device is not None:
        return load_device(device)
    known = {d.soc_model: d for d in packaged_devices() if not d.is_emulated}
    chips = " or ".join(f"--soc {number} ({d.description})" for number, d in sorted(known.items()))
    if soc is None:
        try:
            return choose_device(reported_chip())
        except DeviceUnavailable as error:
            raise CliError(f"this machine has no NPU that hexlm knows; give {chips}") from error
    if soc not in known:
        raise CliError(f"unknown chip {soc}; give {chips} or --device with a .toml file")
    return known[soc]


def with_buckets(target: DeviceConfig, buckets: str | None) -> DeviceConfig:
    """Raises CliError."""
    from server.cli.errors import CliError

    if buckets is None:
        return target
    try:
        numbers = [int(part) for part in buckets.split(",")]
        return target.with_buckets(numbers, target.head_buckets)
    except ValueError as error:
        raise CliError(
            f"--buckets {buckets}: give ascending positive numbers, such as 1,8,32,128"
        ) from error


def describe(store: ContextStore, report: CompileReport, chip: str) -> list[str]:
    """What was done, and what is there from earlier versions."""
    from engine.npu.context_store import folder_bytes, other_folders

    seconds = sum(report.seconds.values())
    made = f"{len(report.seconds)} compiled in {seconds:,.0f} s" if report.seconds else "all there"
    lines = [
        f"{store.bundle.name} is ready for {chip}: {store.num_graphs} graphs, {made}, "
        f"{folder_bytes(store.folder) / 1e6:,.1f} MB in {store.folder}"
    ]
    for folder in other_folders(store.bundle, store.recipe):
        size = f"{folder_bytes(folder) / 1e6:,.1f} MB"
        lines.append(f"{folder} ({size}) is of another QAIRT version and may be deleted")
    return lines
