"""NPU and CPU at once against one after the other, on a simulated device.

    python -m tests.bench.overlap [--rounds 15] [--layers 16] [--json FILE]

The device takes a given time for each call and sleeps through it with the interpreter lock
released, as a driver does; attention takes a given time too. Both compute the real thing meanwhile,
so the two ways must give the same bits, which is checked. Every round runs a step in one piece and
the same step as the dispatcher chooses; the figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from engine.attention import Attend, Attention
from engine.batch import Batch, Float32Array
from engine.cost_profile import KINDS, CostProfile, LaneCosts
from engine.kernels import kernel_cache
from engine.kv_cache import LayerPages
from engine.lane import CpuLane
from engine.lane_timing import time_handover
from engine.model_runner import LaneSteps
from engine.npu.guarded_lane import GuardedLane
from engine.npu.opener import OpenedNpu
from engine.npu.steps import NpuSteps
from engine.step_form import NpuForms
from tests.batches import Span, make_batch
from tests.loaded_model import LoadedModel, load_model
from tests.simulated_lane import Device, SimulatedLane, profile
from tests.tiny_model import import_tiny_model

SEQUENCES = 8
WARM_UPS = 8


@dataclass(frozen=True)
class Case:
    """Milliseconds of a segment and of one layer's attention, for the whole batch.

    `is_bucketed`: half a batch costs the device as much as a whole one.
    """

    name: str
    device_ms: float
    attention_ms: float
    is_bucketed: bool = False


CASES = [
    Case("equal sides", 4.0, 4.0),
    Case("equal sides, short", 2.0, 2.0),
    Case("device takes twice as long", 4.0, 2.0),
    Case("attention takes twice as long", 2.0, 4.0),
    Case("hardly any attention", 4.0, 0.05),
    Case("tiny calls", 0.1, 0.05),
    Case("half a batch costs the device as much", 4.0, 1.0, is_bucketed=True),
]


@dataclass(frozen=True)
class Result:
    case: Case
    serial_ms: float
    chosen_ms: float
    ratio: float
    overlapped: str


class SlowAttention:
    """The real attention, then a sleep until the time of its part of the batch is over."""

    def __init__(self, attention: Attention, seconds_per_sequence: float) -> None:
        self._attention = attention
        self._seconds_per_sequence = seconds_per_sequence

    def begin(self, batch: Batch) -> Attend:
        return partial(self._attend, self._attention.begin(batch), batch.num_sequences)

    def _attend(
        self, attend: Attend, num_sequences: int, qkv: Float32Array, pages: LayerPages,
        out: Float32Array,
    ) -> None:  # fmt: skip
        until_s = time.perf_counter() + num_sequences * self._seconds_per_sequence
        attend(qkv, pages, out)
        if (left_s := until_s - time.perf_counter()) > 0:
            time.sleep(left_s)


def steps_for(case: Case, model: LoadedModel, lane: CpuLane, can_overlap: bool) -> NpuSteps:
    num_layers = model.config.num_layers

    def cost(kind: str, num_rows: int) -> float:
        if kind not in ("first", "middle"):
            return 0.0
        share = 1.0 if case.is_bucketed else num_rows / SEQUENCES
        return case.device_ms / 1e3 * share

    assert isinstance(model.runner, LaneSteps)
    attention = SlowAttention(model.attention, case.attention_ms / 1e3 / SEQUENCES)
    steps = LaneSteps(attention, model.runner.embedding, model.cache)
    device = Device(num_layers, cost)
    return NpuSteps(
        steps,
        model.runner,
        lambda: GuardedLane(model.lane, num_layers),
        OpenedNpu(NpuForms(SimulatedLane(lane, device)), profile_of(case, num_layers), "simulated"),
        watchdog=None,
        may_use_cpu=False,
        can_overlap=can_overlap,
    )


def profile_of(case: Case, num_layers: int) -> CostProfile:
    """What calibration would find: the times above, and this machine's real handover."""
    each_s = case.device_ms / 1e3 / SEQUENCES
    points = tuple((n, n * each_s) for n in (1, SEQUENCES))
    if case.is_bucketed:
        points = ((SEQUENCES, case.device_ms / 1e3),)
    lane = LaneCosts(1e-5, dict.fromkeys(KINDS, points), case.is_bucketed)
    attention_s = case.attention_ms / 1e3 / SEQUENCES
    return replace(
        profile(num_layers, attention_s=attention_s, handover_s=time_handover()),
        lanes={"npu": lane},
    )


def measure(case: Case, model: LoadedModel, lane: CpuLane, rounds: int) -> Result:
    model.logits(*(Span(range(9), [i]) for i in range(SEQUENCES)))
    batch = make_batch([Span([1 + i], [i], 9) for i in range(SEQUENCES)], rows="last")
    serial = steps_for(case, model, lane, can_overlap=False)
    chosen = steps_for(case, model, lane, can_overlap=True)
    ways: list[str] = []

    def run(steps: NpuSteps) -> tuple[float, Float32Array]:
        start_s = time.perf_counter()
        way = steps.choose(batch)
        logits = steps.execute(way, batch).copy()
        if steps is chosen:
            ways.append(way.name)
        return time.perf_counter() - start_s, logits

    times = []
    for i in range(WARM_UPS + rounds):
        order: list[NpuSteps] = [serial, chosen] if i % 2 else [chosen, serial]
        results = {id(steps): run(steps) for steps in order}
        (serial_s, expected), (chosen_s, found) = results[id(serial)], results[id(chosen)]
        assert np.array_equal(found, expected), "the two ways must give the same bits"
        if i >= WARM_UPS:
            times.append((serial_s, chosen_s))
    for steps in (serial, chosen):
        steps.close()
    counted = ways[WARM_UPS:]
    return Result(
        case,
        median(s for s, _ in times) * 1e3,
        median(c for _, c in times) * 1e3,
        median(s / c for s, c in times),
        f"{counted.count('halves')} of {len(counted)}",
    )


def show(results: list[Result], console: Console) -> None:
    table = Table("case", "device", "attention", "one piece", "as chosen", "in halves", "speed")
    for r in results:
        table.add_row(
            r.case.name, f"{r.case.device_ms:g} ms", f"{r.case.attention_ms:g} ms",
            f"{r.serial_ms:.1f} ms", f"{r.chosen_ms:.1f} ms", r.overlapped, f"{r.ratio:.2f} x",
        )  # fmt: skip
    console.print(table)


def load(folder: Path, num_layers: int) -> tuple[LoadedModel, CpuLane]:
    kernel_cache.use_kernel_cache(kernel_cache.default_folder())
    bundle = import_tiny_model(folder, num_layers=num_layers)
    model = load_model(bundle)
    return model, CpuLane(bundle.config, bundle.path, 64, 64, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="NPU and CPU at once, on a simulated device.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, lane = load(Path(folder), options.layers)
        results = [measure(case, model, lane, options.rounds) for case in CASES]
    show(results, Console())
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
