"""The target table: what the models that this project is for cost on this machine's CPU.

    python -m tests.bench.full_size --models qwen2-7b:int4 --folder /somewhere/with/room

Random weights of the true shapes (`hexlm synthesize`) are written, measured in a process of their
own and deleted again, one model at a time. The machine should be idle. Figures for the NPU stand
beside ours as what others expect of it: nothing here was run on one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numba
import numpy as np

from engine.loader import EngineConfig, LoadedEngine, load_engine
from tests.batches import Span, make_batch

PROMPT_TOKENS = 1024
STEP_TOKENS = 512
DECODE_TOKENS = 24
MAX_LENGTH = PROMPT_TOKENS + DECODE_TOKENS + 16
PROBE_BYTES = 1 << 29
ENGINE_BYTES = 600_000_000
"""What an engine may take beyond its weights and its pages."""

NPU_TARGETS = {
    ("phi-3-mini", "int8"): "~80 ms, 25-30 tok/s, ~150 ms, ~5 GB",
    ("phi-3-mini", "int4"): "~50 ms, 35-40 tok/s, ~100 ms, ~3 GB",
    ("qwen2-7b", "int8"): "~180 ms, 12-15 tok/s, ~300 ms, ~9 GB",
    ("qwen2-7b", "int4"): "~120 ms, 18-22 tok/s, ~200 ms, ~5 GB",
    ("llama-3-8b", "int8"): "~220 ms, 10-13 tok/s, ~350 ms, ~10 GB",
    ("llama-3-8b", "int4"): "~150 ms, 15-18 tok/s, ~250 ms, ~6 GB",
    ("qwen2-13b-class", "int4"): "~280 ms, 8-10 tok/s, ~450 ms, ~9 GB",
}
"""Prefill of 1K tokens, decode, TTFT, memory: the seed figures of the project's targets."""


@dataclass(frozen=True)
class Measured:
    """Times in seconds, rates in tokens or bytes per second, sizes in bytes.

    `open_s` is until the weights are mapped and the kernels there, `load_s` with the warm-up and
    the self-test, which run the model. `streamed_bytes` are the weights that one decode step reads.
    `private_bytes` cannot be given back by the system, `resident_bytes` contain mapped weights too.
    """

    like: str
    quant: str
    write_s: float
    open_s: float
    load_s: float
    prefill_s: float
    ttft_s: float
    decode_per_s: float
    bandwidth_per_s: float
    streamed_bytes: int
    weight_bytes: int
    kv_bytes: int
    private_bytes: int
    resident_bytes: int
    kernels: str
    is_finite: bool

    @property
    def share_of_bandwidth(self) -> float:
        return self.decode_per_s * self.streamed_bytes / self.bandwidth_per_s

    @property
    def extra_bytes(self) -> int:
        """Beyond weights and pages."""
        return self.resident_bytes - self.weight_bytes - self.kv_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    done = []
    for model in options.models:
        like, quant = model.split(":")
        measured = measure_model(like, quant, options.folder, options.threads)
        done.append(measured)
        sys.stderr.write(json.dumps(asdict(measured)) + "\n")
    sys.stdout.write(table(done))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.full_size", description=__doc__)
    names = [":".join(target) for target in NPU_TARGETS]
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="SHAPE:QUANT")
    parser.add_argument("--folder", type=Path, help="where to write the models; default: /tmp")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args(arguments)


def measure_model(like: str, quant: str, parent: Path | None, num_threads: int) -> Measured:
    """Writes the model, measures it in a fresh process, deletes it."""
    from server.cli.main import run

    folder = Path(tempfile.mkdtemp(prefix="hexlm-full-size-", dir=parent))
    try:
        started = time.perf_counter()
        out = str(folder / "model")
        if run(["synthesize", "--like", like, "--quant", quant, "--out", out]) != 0:
            raise SystemExit(f"cannot write {like} in {quant}")
        write_s = time.perf_counter() - started
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            return pool.apply(measure, (folder / "model", like, quant, write_s, num_threads))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(folder: Path, like: str, quant: str, write_s: float, num_threads: int) -> Measured:
    """In a process that has done nothing else."""
    loaded, open_s, load_s = open_engine(folder, num_threads)
    table = list(range(-(-MAX_LENGTH // 16)))
    started = time.perf_counter()
    logits = prefill(loaded, table)
    prefill_s = time.perf_counter() - started
    token = int(logits[0].argmax())
    ttft_s = time.perf_counter() - started
    steps = decode(loaded, table, token, Bandwidth(folder, num_threads))
    memory = process_memory()
    weights = streamed_weights(folder)
    return Measured(
        like=like,
        quant=quant,
        write_s=write_s,
        open_s=open_s,
        load_s=load_s,
        prefill_s=prefill_s,
        ttft_s=ttft_s,
        decode_per_s=1 / statistics.median(steps.times),
        bandwidth_per_s=statistics.median(steps.bandwidths),
        streamed_bytes=weights.stat().st_size,
        weight_bytes=weights.stat().st_size,
        kv_bytes=loaded.info.kv_bytes,
        private_bytes=memory["Anonymous"],
        resident_bytes=memory["Rss"],
        kernels=weights.name,
        is_finite=steps.is_finite,
    )


def open_engine(folder: Path, num_threads: int) -> tuple[LoadedEngine, float, float]:
    """The engine, seconds until its weights were mapped, and until it was ready."""
    engine = EngineConfig(
        bundle=folder,
        device="cpu",
        num_threads=num_threads,
        kv_memory_bytes=1 << 40,
        kv_format="int8",
        max_model_len=MAX_LENGTH,
        max_num_seqs=1,
        max_num_batched_tokens=STEP_TOKENS,
    )
    reached: dict[str, float] = {}

    def on_phase(phase: str) -> None:
        reached[phase] = time.perf_counter()

    started = time.perf_counter()
    loaded = load_engine(engine, on_phase)
    return loaded, reached["warming up"] - started, time.perf_counter() - started


def prefill(loaded: LoadedEngine, table: list[int]) -> np.ndarray:
    """Logits [1, V] of the last of `PROMPT_TOKENS` tokens."""
    prompt = np.random.default_rng(0).integers(0, 256, PROMPT_TOKENS).tolist()
    logits = np.empty((0, 0), np.float32)
    for start in range(0, PROMPT_TOKENS, STEP_TOKENS):
        part = prompt[start : start + STEP_TOKENS]
        is_last = start + STEP_TOKENS >= PROMPT_TOKENS
        batch = make_batch([Span(part, table, start)], rows="last" if is_last else "none")
        logits = loaded.runner.execute(batch)
    return logits


@dataclass
class Steps:
    """Seconds of each greedy step, and bytes per second that memory gave right after it."""

    times: list[float] = field(default_factory=list)
    bandwidths: list[float] = field(default_factory=list)
    is_finite: bool = True


def decode(loaded: LoadedEngine, table: list[int], token: int, bandwidth: Bandwidth) -> Steps:
    """Steps and probes in turn, so that a machine that drifts slows both."""
    steps = Steps()
    for position in range(PROMPT_TOKENS, PROMPT_TOKENS + DECODE_TOKENS):
        started = time.perf_counter()
        logits = loaded.runner.execute(make_batch([Span([token], table, position)]))
        token = int(logits[0].argmax())
        steps.times.append(time.perf_counter() - started)
        steps.bandwidths.append(bandwidth.rate())
        steps.is_finite = steps.is_finite and bool(np.isfinite(logits).all())
    return steps


def streamed_weights(folder: Path) -> Path:
    """The file that steps read: the kernels' own panels where there are some."""
    panels = folder / "panels.bin"
    return panels if panels.exists() else folder / "weights.bin"


@numba.njit(nogil=True)
def add_up(words: np.ndarray) -> int:
    total = 0
    for word in words:
        total ^= word
    return total


class Bandwidth:
    """Reads the mapped weights with all threads, as steps do, and does nothing else with them."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        file = streamed_weights(folder)
        size = min(PROBE_BYTES, file.stat().st_size) // 8
        self._words = np.memmap(file, np.int64, "r", shape=(size,))
        self._parts = np.array_split(self._words, num_threads)
        self._pool = ThreadPoolExecutor(num_threads)
        self.rate()  # compiles, and brings the pages in

    def rate(self) -> float:
        """Bytes per second."""
        started = time.perf_counter()
        list(self._pool.map(add_up, self._parts))
        return self._words.nbytes / (time.perf_counter() - started)


def process_memory() -> dict[str, int]:
    """Bytes by kind, from Linux's own account."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


HEADER = (
    "| model | open | ready | prefill 1K | decode | of bandwidth | TTFT 1K | private | resident "
    "| beyond weights + KV | NPU, seed figures, not measured: prefill, decode, TTFT, memory |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def table(models: Sequence[Measured]) -> str:
    return HEADER + "".join(map(row, models))


def row(m: Measured) -> str:
    bar = "" if m.extra_bytes <= ENGINE_BYTES else " (bar: 600 MB)"
    return (
        f"| {m.like} {m.quant} | {m.open_s:.1f} s | {m.load_s:.1f} s | {m.prefill_s:.1f} s | "
        f"{m.decode_per_s:.1f} tok/s | {m.share_of_bandwidth:.0%} of "
        f"{m.bandwidth_per_s / 1e9:.1f} GB/s | {m.ttft_s:.1f} s | {m.private_bytes / 1e9:.2f} GB | "
        f"{m.resident_bytes / 1e9:.2f} GB | {m.extra_bytes / 1e6:,.0f} MB{bar} | "
        f"{NPU_TARGETS[m.like, m.quant]} |\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
