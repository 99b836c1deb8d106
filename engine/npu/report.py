"""Measures on a machine what cannot be known without it, for one model: the NPU report.

What a call costs, how fast tensors get to the NPU and back, every bucket of every kind of segment,
whole steps on each form, prompts, power modes, and how all that holds under load. One document of
plain values; numbers from the emulator are labelled, since it models no speed. Nothing may be
served by this process meanwhile. Decides nothing and prints nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from engine.batch import Batch
from engine.calibration import cpu_call_s, npu_call_s
from engine.cost_profile import CostProfile
from engine.engine_parts import EngineParts
from engine.errors import DeviceError
from engine.lane_timing import THOROUGH, Effort, time_call
from engine.loader import EngineConfig, OnPhase, find_placement, load_parts
from engine.model_runner import ModelRunner
from engine.npu.engine import measure_cpu, measure_npu, open_forms, open_lease, state_folder
from engine.npu.report_batches import decode_batch, prompt_batches
from engine.npu.report_facts import machine_facts, model_facts, provider_facts
from engine.placement import EMULATED, Placement, lane_table
from engine.sampler import Sampler
from engine.step_form import NpuForms, StepForm
from engine.version import own_version
from engine.warm_up import warm_up

if TYPE_CHECKING:
    from engine.npu.qnn_session import QnnOptions

FORMAT = 1

Document = dict[str, Any]

Keep = Callable[[Document], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReportPlan:
    """What is measured, and how long. Sizes that the model or the pages cannot hold are left out.

    `decode_sequences`, `context_lens`: decode steps of so many sequences of such lengths.
    `prompt_lens`: tokens until the first answer. `perf_modes`: the NPU's clocks to compare.
    `load_s`: seconds of steady decoding in each of which `window_s` makes one entry.
    """

    decode_sequences: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    context_lens: tuple[int, ...] = (64, 512, 2048)
    prompt_lens: tuple[int, ...] = (16, 128, 512, 2048)
    perf_modes: tuple[str, ...] = (
        "burst",
        "sustained_high_performance",
        "high_performance",
        "balanced",
        "power_saver",
        "default",
    )
    load_s: float = 180.0
    window_s: float = 10.0
    copy_bytes: tuple[int, ...] = (4096, 65_536, 1_048_576, 8_388_608)
    effort: Effort = THOROUGH


SHORT = ReportPlan(
    decode_sequences=(1, 4),
    context_lens=(64,),
    prompt_lens=(16,),
    perf_modes=("burst", "default"),
    load_s=0.0,
    window_s=1.0,
    copy_bytes=(4096, 65_536),
    effort=Effort(num_runs=1, max_s=0.0),
)
"""Proves that everything works; the numbers say little."""


def make_report(
    engine: EngineConfig, plan: ReportPlan, on_phase: OnPhase, keep: Keep = lambda document: None
) -> Document:
    """`keep` is called with what there is so far: a driver may take the process down.

    Raises what loading an engine raises, and DeviceError when the NPU fails altogether.
    """
    placement = find_placement(engine.device)
    parts = load_parts(engine, on_phase)
    warm_up(parts.cpu, Sampler(parts.bundle.config.vocab_size), parts.bundle.config)
    document: Document = {
        "format": FORMAT,
        "hexlm": own_version(),
        "is_emulated": placement.device == EMULATED,
        "plan": asdict(plan),
        "machine": machine_facts(),
        "model": model_facts(parts),
        "device": {"name": placement.device, "reason": placement.reason},
        "skipped": [],
    }
    on_phase("measuring the CPU")
    profile = measure_cpu(parts, parts.attention(), plan.effort)
    document["call_floor_s"] = {"cpu": cpu_call_s(parts.num_threads)}
    forms: dict[str, StepForm] = {parts.cpu.name: parts.cpu}
    if placement.wants_npu:
        lease = open_lease(placement.device, state_folder(engine.state_folder))
        npu = open_forms(parts, placement.device, on_phase, lease)
        try:
            with lease:
                _add_npu(document, parts, placement, npu, plan, profile, on_phase)
                keep(document)
                document |= _whole_steps(parts, {**forms, **_npu_forms(parts, npu)}, plan, on_phase)
                keep(document)
                _add_load(document, parts, npu, plan, on_phase, keep)
        finally:
            npu.close()
    else:
        document["profile"] = profile.as_json()
        document["skipped"].append(f"everything on the NPU: {placement.reason}")
        document |= _whole_steps(parts, forms, plan, on_phase)
    document["crossover"] = crossover(document["decodes"], document["prompts"])
    return document


def crossover(decodes: Sequence[Document], prompts: Sequence[Document]) -> Document:
    """From how many sequences, and how many prompt tokens, each form is faster than the CPU.

    None where it never is. `decodes` and `prompts` are entries with `form`, `seconds` and a size.
    """
    found: Document = {}
    for key, entries in (("num_sequences", decodes), ("num_tokens", prompts)):
        by_size: dict[tuple[int, int], dict[str, float]] = {}
        for entry in entries:
            size = entry[key], entry.get("context_len", 0)
            by_size.setdefault(size, {})[entry["form"]] = entry["seconds"]
        forms = {form for times in by_size.values() for form in times} - {"cpu"}
        for form in sorted(forms):
            won = [
                size
                for (size, _), times in by_size.items()
                if "cpu" in times and times.get(form, np.inf) < times["cpu"]
            ]
            found.setdefault(form, {})[key] = min(won, default=None)
    return found


def _add_npu(
    document: Document,
    parts: EngineParts,
    placement: Placement,
    npu: NpuForms,
    plan: ReportPlan,
    cpu_profile: CostProfile,
    on_phase: OnPhase,
) -> None:
    from engine.npu.opening import device_config, session_options
    from engine.npu.qnn_session import find_shared_memory

    device = placement.device
    config = device_config(device, parts.npu)
    options = session_options(config)
    document["device"] |= {
        "configuration": config.name,
        "description": config.description,
        "soc_model": config.soc_model,
        "token_buckets": config.token_buckets,
        "head_buckets": config.head_buckets,
        "provider_options": dict(options.provider_options),
        "run_options": dict(options.run_options),
        "has_shared_memory": find_shared_memory(options) is not None,
        **provider_facts(),
    }
    on_phase(f"measuring calls and copies on {device}")
    floor_s = npu_call_s(parts, device)
    document["call_floor_s"][device] = floor_s
    document["copies"] = list(_copies(options, plan, document["device"]["has_shared_memory"]))
    on_phase(f"measuring the segments on {device}")
    profile = measure_npu(
        parts, npu, cpu_profile, may_use_pages=True, effort=plan.effort, call_overhead_s=floor_s
    )
    document["profile"] = profile.as_json()
    document["plan_in_words"] = lane_table(profile, device).reason


def _npu_forms(parts: EngineParts, npu: NpuForms) -> dict[str, StepForm]:
    """Every step wholly on the NPU but for the attention, and those with it inside."""
    runner = ModelRunner(npu.lane, parts.attention(), parts.embedding, parts.cache)
    return {runner.name: runner, **{form.name: form for form in npu.whole}}


def _whole_steps(
    parts: EngineParts, forms: Mapping[str, StepForm], plan: ReportPlan, on_phase: OnPhase
) -> Document:
    """`decodes` and `prompts` on each form, and the account of one decode of each."""
    decodes, prompts, moved = [], [], {}
    for name, form in forms.items():
        on_phase(f"measuring whole steps on {name}")
        for context_len in plan.context_lens:
            for count in plan.decode_sequences:
                if not _has_room(parts, count, context_len):
                    continue
                batch = decode_batch(count, context_len, parts.cache.num_blocks)
                if not form.fits(batch):
                    continue
                seconds = time_call(partial(form.execute, batch), plan.effort)
                decodes.append(
                    {
                        "form": name,
                        "num_sequences": count,
                        "context_len": context_len,
                        "seconds": seconds,
                        "tokens_per_s": count / seconds,
                    }
                )
        for length in plan.prompt_lens:
            chunks = list(prompt_batches(length, parts.max_tokens, parts.cache.num_blocks))
            if length <= parts.max_model_len and all(map(form.fits, chunks)):
                seconds = time_call(partial(_execute_all, form, chunks), plan.effort)
                prompts.append(
                    {
                        "form": name,
                        "num_tokens": length,
                        "seconds": seconds,
                        "tokens_per_s": length / seconds,
                    }
                )
        moved[name] = _moved(form, decode_batch(1, 64, parts.cache.num_blocks))
    return {"decodes": decodes, "prompts": prompts, "moved_by_a_decode": moved}


def _add_load(
    document: Document,
    parts: EngineParts,
    npu: NpuForms,
    plan: ReportPlan,
    on_phase: OnPhase,
    keep: Keep,
) -> None:
    """`load`: whether it stays as fast; then `perf_modes`, against each other."""
    form = ModelRunner(npu.lane, parts.attention(), parts.embedding, parts.cache)
    decode = partial(form.execute, decode_batch(1, 64, parts.cache.num_blocks))
    on_phase(f"decoding for {plan.load_s:.0f} s")
    document["load"] = list(steady_load(decode, plan.load_s, plan.window_s, perf_counter))
    document["perf_modes"] = []
    if document["is_emulated"]:
        document["skipped"].append("power modes: the emulator has no clocks")
        return
    keep(document)
    for mode in plan.perf_modes:
        on_phase(f"measuring the power mode {mode}")
        try:
            set_perf_mode(npu, mode)
            seconds = time_call(decode, plan.effort)
        except DeviceError as error:
            document["skipped"].append(f"power mode {mode}: {error}")
            continue
        entry = {"perf_mode": mode, "seconds": seconds, "tokens_per_s": 1 / seconds}
        document["perf_modes"].append(entry)
        keep(document)


def steady_load(
    call: Callable[[], object], load_s: float, window_s: float, clock: Callable[[], float]
) -> Iterator[Document]:
    """Calls again and again for `load_s`: how many a second, window by window."""
    start_s = window_start_s = clock()
    num_calls = 0
    while clock() - start_s < load_s:
        call()
        num_calls += 1
        elapsed_s = clock() - window_start_s
        if elapsed_s >= window_s:
            at_s = window_start_s - start_s
            yield {"at_s": at_s, "calls_per_s": num_calls / elapsed_s, "cpu_percent": _cpu()}
            window_start_s, num_calls = clock(), 0


def set_perf_mode(npu: NpuForms, perf_mode: str) -> None:
    """On every session of the lane. Raises DeviceError."""
    from engine.npu.lane import NpuLane
    from engine.npu.qnn_session import QnnSession

    assert isinstance(npu.lane, NpuLane)
    for session in npu.lane.sessions:
        if isinstance(session, QnnSession):
            session.set_perf_mode(perf_mode)


def _copies(options: QnnOptions, plan: ReportPlan, has_shared_memory: bool) -> Iterator[Document]:
    """Seconds of a graph that only adds, by the bytes of its input and output together."""
    from engine.npu.calls import HostMemory, PlainMemory
    from engine.npu.qnn_session import find_shared_memory, open_graph
    from engine.probe_graph import INPUT, OUTPUT, probe_graph

    memories: dict[str, HostMemory] = {"plain": PlainMemory()}
    shared = find_shared_memory(options) if has_shared_memory else None
    if shared is not None:
        memories["shared"] = shared
    for num_bytes in plan.copy_bytes:
        shape = (1, num_bytes // 2 // 4 // 1024 or 1, min(num_bytes // 2 // 4, 1024))
        session = open_graph(probe_graph(shape), f"copy of {num_bytes} bytes", options)
        for name, memory in memories.items():
            source, target = (memory.allocate(*shape[1:]) for _ in range(2))
            binding = memory.binding(session)
            binding.bind_input(INPUT, source)
            binding.bind_output(OUTPUT, target)
            seconds = time_call(binding.run, plan.effort)
            yield {"memory": name, "num_bytes": source.nbytes + target.nbytes, "seconds": seconds}


def _execute_all(form: StepForm, batches: Sequence[Batch]) -> None:
    for batch in batches:
        form.execute(batch)


def _has_room(parts: EngineParts, num_sequences: int, context_len: int) -> bool:
    return context_len <= parts.max_model_len and num_sequences <= min(
        parts.max_rows, parts.max_tokens
    )


def _moved(form: StepForm, batch: Batch) -> Document:
    """What one step of this form moves; see `lane.LaneCounters`."""
    before = asdict(form.counters)
    form.execute(batch)
    return {key: value - before[key] for key, value in asdict(form.counters).items()}


def _cpu() -> float:
    """Of the whole machine, since it was last asked."""
    return float(psutil.cpu_percent())
