"""Measures what a model costs on each lane of this machine, and keeps it for every later start.

More thorough than what an engine measures when it first opens an NPU, and with the CPU's lane too,
so that steps can be divided. Nothing may be served by this process meanwhile.
"""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.cost_profile import CostProfile
from engine.engine_parts import EngineParts
from engine.errors import EngineError
from engine.lane_timing import THOROUGH, Effort, time_call, time_lane
from engine.loader import EngineConfig, OnPhase, find_placement, load_parts
from engine.npu.engine import (
    CALIBRATED,
    measure_cpu,
    measure_npu,
    open_forms,
    open_lease,
    state_folder,
)
from engine.placement import CPU, EMULATED, Placement
from engine.probe_graph import INPUT, OUTPUT, SHAPE, probe_graph
from engine.profile_store import ProfileStore
from engine.sampler import Sampler
from engine.session import CpuSessions, Session
from engine.warm_up import warm_up

logger = logging.getLogger(__name__)

EMULATED_EFFORT = Effort(num_runs=1, max_s=0.0)


@dataclass(frozen=True, slots=True)
class Calibration:
    """`path` is where the profile is kept; `skipped` says what could not be measured, and why."""

    placement: Placement
    profile: CostProfile
    path: Path
    skipped: tuple[str, ...]


def calibrate(engine: EngineConfig, on_phase: OnPhase) -> Calibration:
    """Raises what loading an engine raises, or OSError when the profile cannot be written."""
    placement = find_placement(engine.device)
    parts = load_parts(engine, on_phase)
    warm_up(parts.cpu, Sampler(parts.bundle.config.vocab_size), parts.bundle.config)
    on_phase("measuring whole steps on the cpu")
    profile = measure_cpu(parts, parts.attention(), THOROUGH)
    on_phase("measuring the segments on the cpu")
    profile, skipped = _with_cpu_lane(parts, profile)
    state = state_folder(engine.state_folder)
    if placement.wants_npu:
        profile = _with_npu(parts, placement.device, state, profile, on_phase)
    path = ProfileStore(state / "profiles").save(
        parts.profile_key(placement.device), profile, CALIBRATED
    )
    return Calibration(placement, profile, path, skipped)


def _with_cpu_lane(parts: EngineParts, profile: CostProfile) -> tuple[CostProfile, tuple[str, ...]]:
    try:
        lane = parts.open_cpu_lane()
    except EngineError as error:  # some models have no graphs for it
        return profile, (f"segments on the cpu: {error}",)
    costs = time_lane(
        lane,
        profile.num_layers,
        parts.token_counts,
        parts.row_counts,
        is_bucketed=False,
        call_overhead_s=cpu_call_s(parts.num_threads),
        effort=THOROUGH,
    )
    return replace(profile, lanes={CPU: costs}), ()


def _with_npu(
    parts: EngineParts, device: str, state: Path, profile: CostProfile, on_phase: OnPhase
) -> CostProfile:
    lease = open_lease(device, state)
    forms = open_forms(parts, device, on_phase, lease)
    on_phase(f"measuring the segments on {device}")
    effort = EMULATED_EFFORT if device == EMULATED else THOROUGH
    with lease:
        measured = measure_npu(
            parts, forms, profile, may_use_pages=True, effort=effort,
            call_overhead_s=npu_call_s(parts, device),
        )  # fmt: skip
    forms.close()
    return measured


def cpu_call_s(num_threads: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.onnx"
        path.write_bytes(probe_graph())
        return _call_s(CpuSessions(num_threads).open(path))


def npu_call_s(parts: EngineParts, device: str) -> float:
    from engine.npu.opening import device_config, session_options
    from engine.npu.qnn_session import open_graph

    options = session_options(device_config(device, parts.npu))
    return _call_s(open_graph(probe_graph(), "probe", options))


def _call_s(session: Session) -> float:
    source, target = np.ones(SHAPE, np.float32), np.zeros(SHAPE, np.float32)
    session.bind_input(INPUT, source)
    session.bind_output(OUTPUT, target)
    return time_call(session.run, THOROUGH)
