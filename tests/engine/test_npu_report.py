"""The report holds everything it promises, on the CPU and in the emulator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.bundle import Bundle
from engine.errors import DeviceError
from engine.loader import EngineConfig, load_parts
from engine.npu import report as npu_report
from engine.npu.device_config import NpuSettings
from engine.npu.report import SHORT, Document, crossover, make_report, steady_load
from engine.npu.report_batches import decode_batch, prompt_batches
from engine.step_form import NpuForms


@pytest.fixture
def engine(tiny_bundle: Bundle, tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        bundle=tiny_bundle.path,
        device="cpu",
        num_threads=1,
        kv_memory_bytes=1 << 20,
        kv_format="int8",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        state_folder=tmp_path,
    )


def report(engine: EngineConfig) -> tuple[Document, list[str]]:
    phases: list[str] = []
    document = make_report(engine, replace(SHORT, load_s=0.05, window_s=0.01), phases.append)
    return json.loads(json.dumps(document)), phases


def test_on_the_cpu_it_says_what_is_missing(engine: EngineConfig) -> None:
    document, _ = report(engine)
    assert document["is_emulated"] is False
    assert {(d["form"], d["num_sequences"]) for d in document["decodes"]} == {
        ("cpu", 1),
        ("cpu", 4),
    }
    assert [p["num_tokens"] for p in document["prompts"]] == [16]
    assert document["skipped"] == ["everything on the NPU: asked for with --device cpu"]
    assert document["crossover"] == {}


@pytest.mark.npu
def test_in_the_emulator_everything_is_there_and_labelled(
    engine: EngineConfig, emulator: None
) -> None:
    settings = NpuSettings(fused=True)
    document, phases = report(replace(engine, device="npu-emulated", npu=settings))
    assert document["is_emulated"] is True
    forms = {"cpu", "npu-emulated", "npu-emulated-fused"}
    assert {d["form"] for d in document["decodes"]} == forms
    assert set(document["moved_by_a_decode"]) == forms
    assert document["moved_by_a_decode"]["npu-emulated"]["copied_bytes"] > 0
    assert set(document["call_floor_s"]) == {"cpu", "npu-emulated"}
    assert [copy["num_bytes"] for copy in document["copies"]] == list(SHORT.copy_bytes)
    assert set(document["profile"]["lanes"]["npu-emulated"]["segments"]) == {
        *("first", "middle", "last", "head")
    }
    assert document["load"]
    assert [what.split(":")[0] for what in document["skipped"]] == ["power modes"]
    assert document["device"]["soc_model"] == 88
    assert any(phase.startswith("compiling") for phase in phases)


def test_power_modes_are_compared_and_a_refused_one_is_named(
    engine: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU's lane in place of an NPU's."""
    parts = load_parts(engine, lambda phase: None)
    forms = NpuForms(parts.open_cpu_lane())
    set_modes: list[str] = []

    def set_perf_mode(npu: NpuForms, mode: str) -> None:
        if mode == "turbo":
            raise DeviceError("unknown mode")
        set_modes.append(mode)

    monkeypatch.setattr(npu_report, "set_perf_mode", set_perf_mode)
    document: Document = {"is_emulated": False, "skipped": []}
    kept: list[int] = []
    plan = replace(SHORT, perf_modes=("burst", "turbo", "default"), load_s=0.0)
    npu_report._add_load(
        document,
        parts,
        forms,
        plan,
        lambda phase: None,
        lambda d: kept.append(len(d["perf_modes"])),
    )
    assert set_modes == ["burst", "default"] and kept == [0, 1, 2]
    assert [mode["perf_mode"] for mode in document["perf_modes"]] == set_modes
    assert document["skipped"] == ["power mode turbo: unknown mode"]


def test_the_crossover_is_the_least_size_at_which_a_form_wins() -> None:
    def entry(form: str, size: int, seconds: float) -> Document:
        return {"form": form, "num_sequences": size, "num_tokens": size, "seconds": seconds}

    decodes = [entry("cpu", n, float(n)) for n in (1, 2, 4)]
    decodes += [entry("npu", n, 3.0) for n in (1, 2, 4)]
    prompts = [entry("cpu", 16, 1.0), entry("npu", 16, 2.0), entry("npu", 32, 2.0)]
    found = crossover(decodes, prompts)
    assert found == {"npu": {"num_sequences": 4, "num_tokens": None}}


def test_steady_load_counts_calls_in_windows() -> None:
    now = [0.0]

    def call() -> None:
        now[0] += 0.5 if now[0] < 4 else 1.0

    windows = list(steady_load(call, 8.0, 2.0, lambda: now[0]))
    assert [(w["at_s"], w["calls_per_s"]) for w in windows] == [
        *((0.0, 2.0), (2.0, 2.0), (4.0, 1.0), (6.0, 1.0))
    ]


def test_batches_are_what_the_engine_would_build() -> None:
    batch = decode_batch(3, 40, 64)
    assert batch.context_lens.tolist() == [40, 40, 40]
    assert batch.slot_mapping.tolist() == [16 * 2 + 7, 16 * 5 + 7, 16 * 8 + 7]
    chunks = list(prompt_batches(70, 32, 64))
    assert [chunk.num_tokens for chunk in chunks] == [32, 32, 6]
    assert [len(chunk.logits_rows) for chunk in chunks] == [0, 0, 1]
    positions = np.concatenate([chunk.positions for chunk in chunks])
    assert positions.tolist() == list(range(70))
    assert all(chunk.context_lens[0] == chunk.positions[-1] + 1 for chunk in chunks)
