"""What is measured has the right shape and order; the times themselves are the machine's."""

from __future__ import annotations

import numpy as np
import pytest

from engine.batch import Batch, Float32Array
from engine.bundle import Bundle
from engine.cost_profile import KINDS
from engine.lane_timing import (
    Effort,
    Pages,
    context_lens_up_to,
    time_attention,
    time_call,
    time_copy,
    time_cpu_form,
    time_form,
    time_handover,
    time_lane,
)
from tests.batches import Span
from tests.loaded_model import LoadedModel, load_model
from tests.simulated_lane import Device, SimulatedLane

ONCE = Effort(num_runs=1, max_s=0.0)
PAGES = Pages(num_blocks=64, max_model_len=40)


@pytest.fixture(scope="module")
def model(tiny_bundle: Bundle) -> LoadedModel:
    return load_model(tiny_bundle)


def test_every_kind_of_segment_is_run_at_every_size(model: LoadedModel) -> None:
    seconds = {"first": 0.002, "middle": 0.004, "last": 0.006, "head": 0.008}
    device = Device(2, lambda kind, rows: seconds[kind])
    costs = time_lane(SimulatedLane(model.lane, device), 2, (1, 8, 32), (1, 4), True, effort=ONCE)
    assert {kind: [n for n, _ in points] for kind, points in costs.segments.items()} == {
        "first": [1, 8, 32], "middle": [1, 8, 32], "last": [1, 4], "head": [1, 4]
    }  # fmt: skip
    for kind in KINDS:
        assert all(found >= seconds[kind] for _, found in costs.segments[kind])
    assert costs.is_bucketed and costs.call_overhead_s >= 0.002
    assert device.num_calls == 2 * (2 * 3 + 2 * 2), "each once more than it counts"


def test_a_given_call_overhead_is_kept(model: LoadedModel) -> None:
    costs = time_lane(model.lane, 2, (1,), (1,), False, call_overhead_s=1e-4, effort=ONCE)
    assert costs.call_overhead_s == 1e-4 and not costs.is_bucketed


def test_whole_steps_are_measured_by_tokens_and_by_rows(model: LoadedModel) -> None:
    steps, rows = time_cpu_form(model.runner, (1, 8, 100), (1, 2), PAGES, ONCE)
    assert [n for n, _ in steps] == [1, 8, 100] and [n for n, _ in rows] == [1, 2]
    assert all(seconds > 0 for _, seconds in (*steps, *rows))


def test_batches_keep_to_the_longest_sequence_and_to_the_pages(model: LoadedModel) -> None:
    seen: list[Batch] = []

    class Recorder:
        def execute(self, batch: Batch) -> Float32Array:
            seen.append(batch)
            return np.zeros((1, 1), np.float32)

    time_cpu_form(Recorder(), (1, 40, 100), (1, 64), Pages(2, 40), ONCE)  # type: ignore[arg-type]
    assert {batch.num_tokens for batch in seen} == {1, 40, 64, 100}
    for batch in seen:
        assert batch.context_lens.max() <= 40 and batch.positions.max() < 40
        assert batch.slot_mapping.max() < 32 and batch.block_tables.max() < 2
        last = batch.query_starts[1:] - 1
        assert np.array_equal(batch.positions[last] + 1, batch.context_lens)
        assert batch.num_tokens == batch.query_starts[-1] == len(batch.positions)


def test_a_form_is_measured_where_its_steps_fit(model: LoadedModel) -> None:
    class Small:
        def __getattr__(self, name: str) -> object:
            return getattr(model.runner, name)

        def fits(self, batch: object) -> bool:
            return batch.num_tokens <= 8  # type: ignore[attr-defined, no-any-return]

    found = time_form(Small(), [(1, 64), (8, 64), (32, 64)], PAGES, ONCE)  # type: ignore[arg-type]
    assert [(tokens, context) for tokens, context, _ in found.steps] == [(1, 64), (8, 64)]


def test_attention_is_measured_by_context_also_where_the_pages_are_few(model: LoadedModel) -> None:
    decode, chunk = time_attention(
        model.attention, model.config, model.cache, (64, model.config.context_length), 512, ONCE
    )
    assert [n for n, _ in decode] == [n for n, _ in chunk] == [64, model.config.context_length]
    logits = model.logits(Span([1, 2, 3], [0]))
    assert np.isfinite(logits).all(), "the pages are as usable as before"


@pytest.mark.parametrize(
    ("longest", "expected"),
    [(16, (16,)), (64, (64,)), (300, (64, 256)), (9_000, (64, 256, 1024, 4096))],
)
def test_contexts_are_those_that_fit(longest: int, expected: tuple[int, ...]) -> None:
    assert context_lens_up_to(longest) == expected


def test_copies_handovers_and_calls_take_time() -> None:
    assert 1e6 < time_copy(64, ONCE) < 1e13
    assert 0 < time_handover() < 1
    calls: list[int] = []
    assert time_call(lambda: calls.append(1), ONCE) > 0
    assert len(calls) == 2
