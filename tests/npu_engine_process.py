"""A real engine process on the tiny model with a simulated NPU beside its CPU.

Everything is as in an engine with an NPU (loader, dispatcher, lease, watchdog, memory of hangs)
but the device, its costs and how long a call may take.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import loader
from engine.cost_profile import CostProfile
from engine.engine_parts import EngineParts
from engine.loader import EngineConfig, LoadedEngine, load_engine
from engine.npu import engine as npu_engine
from engine.placement import Placement
from engine.step_form import NpuForms
from scheduler.policy import SchedulerConfig
from scheduler.process import engine_process_main
from tests.simulated_lane import Device, Faults, Place, SimulatedLane, profile

REASON = "a simulated NPU"


def engine_config(bundle: Path, state: Path, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "device": "auto",
        "num_threads": 1,
        "kv_memory_bytes": 1 << 22,
        "kv_format": "int8",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "kernels": "onnxruntime",
        "state_folder": state,
    }
    return EngineConfig(bundle=bundle, **(values | changes))


def simulate(
    device: Device,
    is_strict: bool = False,
    call_bound_s: float = 1.0,
    replace: Callable[[Any, str, Any], None] = setattr,
) -> None:
    """Makes this process find, open and measure a simulated NPU."""

    def find_placement(requested: str) -> Placement:
        return Placement("npu", REASON, is_strict=is_strict)

    def open_forms(parts: EngineParts, name: str, on_phase: Any, lease: Any) -> NpuForms:
        on_phase("compiling 1 of 2")
        return NpuForms(SimulatedLane(parts.open_cpu_lane(), device, name))

    def measure_npu(parts: EngineParts, *args: Any, **options: Any) -> CostProfile:
        return profile(parts.bundle.config.num_layers, attention_s=1e-9, handover_s=1.0)

    replace(loader, "find_placement", find_placement)
    replace(npu_engine, "open_forms", open_forms)
    replace(npu_engine, "measure_npu", measure_npu)
    replace(npu_engine, "CALL_BOUND_S", call_bound_s)


def load_with_open_npu(config: EngineConfig, on_phase: Callable[[str], None]) -> LoadedEngine:
    """Waits until the NPU is open, or known to stay closed."""
    engine = load_engine(config, on_phase)
    if engine.devices.report.lanes[0].state == "opening":
        engine.runner._opener.wait(60)  # type: ignore[attr-defined]
    return engine


def hang() -> None:
    threading.Event().wait()


def run_hanging_engine(connection: Any, bundle: Path, state: Path) -> None:
    """The first process hangs at its twentieth step on the NPU; a later one finds it closed."""
    faults = Faults(Place(1), hang, nth=20)
    simulate(Device(2, faults=faults))
    config = engine_config(bundle, state)
    scheduling = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_logits_rows=64)
    engine_process_main(connection, lambda report: load_with_open_npu(config, report), scheduling)
