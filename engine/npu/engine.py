"""Puts the NPU beside the CPU: lanes, profile, lease, watchdog and the dispatcher over them all.

The part of loading that an engine without an NPU never imports.
"""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import platformdirs

from engine.cost_profile import CostProfile
from engine.device_board import DeviceBoard, DeviceReport, LaneReport
from engine.dispatcher import Dispatcher, NpuPolicy
from engine.engine_parts import EngineParts
from engine.kernels.attention_kernel import KernelAttention
from engine.kv_format import BLOCK_SIZE
from engine.lane_timing import (
    QUICK,
    Effort,
    context_lens_up_to,
    time_attention,
    time_copy,
    time_cpu_form,
    time_form,
    time_handover,
    time_lane,
)
from engine.model_runner import LaneSteps
from engine.npu.fault_memory import FaultMemory
from engine.npu.guarded_lane import GuardedLane
from engine.npu.lane_gate import GateState
from engine.npu.lease import NoLease, NpuLease
from engine.npu.opener import NpuOpener, OnPhase, OpenedNpu
from engine.npu.watchdog import Watchdog
from engine.placement import CPU, EMULATED, NPU, Placement
from engine.profile_store import ProfileStore
from engine.step_form import NpuForms

logger = logging.getLogger(__name__)

CALL_BOUND_S = 20.0
"""A call that takes longer hangs: the slowest that was ever reported takes a fraction of a second.

The emulator's calls are computed and not bounded.
"""

_QUICK_COUNTS = (1, 8, 32, 128)

AT_START, CALIBRATED = "measured at start", "calibrated"


def state_folder(folder: Path | None) -> Path:
    """Where the lease, the memory of hangs and the profiles lie; the user's cache by default."""
    return folder or Path(platformdirs.user_cache_dir("hexlm", appauthor=False))


def open_lease(device: str, state: Path) -> NpuLease | NoLease:
    """Nothing else can disturb the emulator. Raises DeviceUnavailable."""
    return NpuLease(state / "npu.lease") if device == NPU else NoLease()


def open_beside_cpu(
    parts: EngineParts, placement: Placement, folder: Path | None, on_phase: OnPhase
) -> tuple[Dispatcher, DeviceBoard]:
    """The dispatcher, with the NPU open in strict mode and being opened otherwise.

    Nothing else may use the pages yet. Raises DeviceUnavailable, DeviceError or BundleError when
    an NPU that was asked for by name cannot be opened.
    """
    state = state_folder(folder)
    is_real = placement.device == NPU
    lanes = (LaneReport(placement.device, GateState.CLOSED), LaneReport(CPU, GateState.OPEN))
    board = DeviceBoard(DeviceReport(placement.device, placement.reason, lanes))
    memory = FaultMemory(state / "npu-hang.json") if is_real else None
    lease = open_lease(placement.device, state)
    attention = parts.attention()
    on_phase("measuring the CPU")
    opening = _Opening(parts, placement, ProfileStore(state / "profiles"), lease, attention)

    def announce(phase: str) -> None:
        board.set_lane(placement.device, GateState.OPENING, phase)
        if placement.is_strict and not dispatcher.has_been_open:
            on_phase(phase)

    num_layers = parts.bundle.config.num_layers
    dispatcher = Dispatcher(
        LaneSteps(attention, parts.embedding, parts.cache),
        parts.cpu,
        functools.cache(lambda: GuardedLane(parts.open_cpu_lane(), num_layers)),
        placement.device,
        NpuOpener(opening.open, announce),
        board,
        NpuPolicy(placement.is_strict),
        lease,
        Watchdog(CALL_BOUND_S, memory.end_process) if memory is not None else None,
        memory,
    )
    dispatcher.open()
    return dispatcher, board


class _Opening:
    """Opens the NPU and finds out what it costs. `open` runs in the opener's thread."""

    def __init__(
        self,
        parts: EngineParts,
        placement: Placement,
        store: ProfileStore,
        lease: AbstractContextManager[None],
        attention: KernelAttention,
    ) -> None:
        self._parts = parts
        self._device = placement.device
        self._may_use_pages = placement.is_strict  # then nobody is served yet, the first time
        self._store = store
        self._lease = lease
        self._key = parts.profile_key(placement.device)
        stored = store.load(self._key)
        self._profile = stored.profile if stored is not None else None
        self._origin = stored.origin if stored is not None else ""
        self._cpu_part: CostProfile | None = None
        config, cache = parts.bundle.config, parts.cache
        if self._profile is None and placement.device != EMULATED:
            # The emulator's calls take seconds, and there is nothing to choose.
            self._cpu_part = measure_cpu(parts, attention)
        else:  # its kernels must be compiled before the first request all the same
            time_attention(
                attention,
                config,
                cache,
                context_lens_up_to(min(64, parts.max_model_len)),
                parts.max_tokens,
                replace(QUICK, num_runs=1),
            )

    def open(self, on_phase: OnPhase) -> OpenedNpu:
        """Raises DeviceError, DeviceUnavailable or BundleError."""
        forms = open_forms(self._parts, self._device, on_phase, self._lease)
        if self._profile is None and self._cpu_part is not None:
            on_phase("measuring the NPU")
            cpu_part = self._cpu_part
            with self._lease:
                self._profile = measure_npu(
                    self._parts, forms, cpu_part, may_use_pages=self._may_use_pages
                )
            self._origin = AT_START
            self._save(self._profile)
        self._may_use_pages = False
        return OpenedNpu(forms, self._profile, f"costs {self._origin or 'not measured'}")

    def _save(self, profile: CostProfile) -> None:
        try:
            self._store.save(self._key, profile, AT_START)
        except OSError as error:
            logger.warning("the cost profile cannot be kept: %s", error)


def open_forms(
    parts: EngineParts, device: str, on_phase: OnPhase, lease: AbstractContextManager[None]
) -> NpuForms:
    """Compiles what is missing and loads it. Raises DeviceError or DeviceUnavailable."""
    from engine.npu.opening import open_npu

    return open_npu(
        bundle=parts.bundle,
        device=device,
        max_tokens=parts.max_tokens,
        max_rows=parts.max_rows,
        embedding=parts.embedding,
        cache=parts.cache,
        max_model_len=parts.max_model_len,
        on_phase=on_phase,
        lease=lease,
        settings=parts.npu,
    )


def measure_cpu(
    parts: EngineParts, attention: KernelAttention, effort: Effort = QUICK
) -> CostProfile:
    """A profile without an NPU. Writes to the pages."""
    config, cache = parts.bundle.config, parts.cache
    longest = min(parts.max_model_len, parts.cache.num_blocks * BLOCK_SIZE)
    counts, row_counts = parts.token_counts, parts.row_counts
    if effort is QUICK:  # on a large model more sizes would take a minute
        counts, row_counts = _thinned(counts), _thinned(row_counts)
    steps, rows = time_cpu_form(parts.cpu, counts, row_counts, parts.pages, effort)
    decode, chunk = time_attention(
        attention, config, cache, context_lens_up_to(longest), parts.max_tokens, effort
    )
    return CostProfile(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        cpu_step=steps,
        cpu_rows=rows,
        lanes={},
        decode_attention=decode,
        chunk_attention=chunk,
        copy_bytes_per_s=time_copy(config.hidden_size, effort),
        handover_s=time_handover(),
        whole={},
    )


def _thinned(counts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in counts if n in _QUICK_COUNTS)


def measure_npu(
    parts: EngineParts,
    forms: NpuForms,
    cpu_part: CostProfile,
    may_use_pages: bool,
    effort: Effort = QUICK,
    call_overhead_s: float | None = None,
) -> CostProfile:
    """`cpu_part` with the NPU's costs. Forms of whole steps write to pages. Raises DeviceError."""
    lane_costs = time_lane(
        forms.lane,
        parts.bundle.config.num_layers,
        parts.token_counts,
        parts.row_counts,
        is_bucketed=True,
        call_overhead_s=call_overhead_s,
        effort=effort,
    )
    whole = {}
    if may_use_pages:
        steps = [(n, c) for n in (1, 8, 32) for c in (64, 256, 1024) if c <= parts.max_model_len]
        for form in forms.whole:
            costs = time_form(form, steps, parts.pages, effort)
            if costs.steps:
                whole[form.name] = costs
    return replace(cpu_part, lanes={**cpu_part.lanes, forms.lane.name: lane_costs}, whole=whole)
