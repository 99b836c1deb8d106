"""Each verdict, by the facts that lead to it; and facts from a benchmark."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from engine.roofline import Roofline
from server.bench.bench_facts import facts_of
from server.bench.explanation import Bound, Facts, explain
from server.bench.results import FigureKey, Results
from server.bench.roofline_record import (
    better_of,
    read_roofline,
    recorded_roofline,
    roofline_lines,
    roofline_record,
)
from tests.server.bench.bench_rig import empty_results

MACHINE = Roofline(2, 1 << 28, 10e9, {(4, 1): 1e11, (4, 8): 2e11, (8, 1): 1e11, (8, 8): 2e11})
DECODE = Facts(
    "decode", 0.012, own_s=0.001, weight_bytes=100e6, operations=0.2e9, bandwidth=10e9, peak=1e11
)


def bound(**changes: Any) -> Bound:
    return explain(replace(DECODE, **changes)).bound


def test_weights_that_take_longest_to_read_are_bandwidth() -> None:
    verdict = explain(DECODE)
    assert verdict.bound is Bound.BANDWIDTH
    assert verdict.numbers == (
        "12 ms; 100.0 MB of weights and 0.0 MB of keys and values at 10.0 GB/s take 10 ms, "
        "0.20 G operations at 100 G/s take 2 ms: 0.83 of the limit"
    )
    assert "quantize" in verdict.knob


def test_operations_that_take_longest_are_compute() -> None:
    assert bound(operations=1.1e9) is Bound.COMPUTE


def test_more_keys_and_values_than_weights_are_attention() -> None:
    assert bound(kv_bytes=101e6, step_s=0.03) is Bound.ATTENTION
    assert bound(kv_bytes=99e6, step_s=0.03) is Bound.BANDWIDTH


def test_more_attention_than_matrix_products_is_attention() -> None:
    assert bound(weight_bytes=1e6, operations=0.4e9, attention_operations=0.2e9) is Bound.ATTENTION


def test_measured_attention_counts_even_without_limits() -> None:
    assert bound(attention_s=0.007, peak=None) is Bound.ATTENTION
    assert bound(attention_s=0.005) is Bound.BANDWIDTH


def test_much_of_its_own_work_is_overhead() -> None:
    verdict = explain(replace(DECODE, own_s=0.004))
    assert verdict.bound is Bound.OVERHEAD
    assert verdict.numbers == "12 ms, of which 4 ms (33 %) not in the model"


def test_waiting_longer_than_computing_is_queueing() -> None:
    verdict = explain(replace(DECODE, queue_s=0.013, own_s=0.01))
    assert verdict.bound is Bound.QUEUEING
    assert verdict.numbers == "13 ms of waiting for the first step, then 12 ms"
    assert bound(queue_s=0.011) is Bound.BANDWIDTH


def test_most_of_the_time_on_the_npu_is_its_calls() -> None:
    verdict = explain(replace(DECODE, npu_s=0.007, num_npu_calls=31))
    assert verdict.bound is Bound.NPU_CALLS
    assert verdict.numbers == "12 ms, of which 7 ms in 31 NPU calls"


def test_far_from_every_limit_is_not_explained_and_without_limits_not_known() -> None:
    assert bound(step_s=0.1) is Bound.UNEXPLAINED
    assert bound(bandwidth=None) is Bound.UNKNOWN
    assert bound(weight_bytes=None) is Bound.UNKNOWN


def decode_results() -> Results:
    results = empty_results()
    results.targets["hexlm"] = {
        "kv_format": "int8",
        "cost": {
            "weight_bytes": 100e6,
            "layer_operations": 150e6,
            "head_operations": 50e6,
            "attention_operations": 1000,
            "weight_bits": 4,
            "kv_bytes_per_token": {"int8": 10_000, "f32": 40_000},
        },
    }
    decode = ("decode", "context 64, 128 new")
    concurrent = ("concurrency", "8 streams")
    figures = [
        (decode, "TPOT", "ms", 12.0, 64),
        (decode, "answer", "tokens", 128.0, 64),
        (decode, "step: execute", "ms", 11.0, 64),
        (decode, "step: own work", "ms", 0.5, 64),
        (decode, "tokens a step", "tokens", 1.0, 64),
        (("prefill", "512 tokens"), "TTFT", "ms", 800.0, 512),
        (concurrent, "rate, all", "tokens/s", 400.0, 8),
        (concurrent, "tokens a step", "tokens", 8.0, 8),
        (concurrent, "step: execute", "ms", 16.0, 8),
        (("arrivals", "Poisson, 4/s"), "TTFT p50", "ms", 900.0, 4),
        (("arrivals", "Poisson, 4/s"), "queue", "ms", 700.0, 4),
        (("cancels", "8 leave"), "TTFT before", "ms", 1.0, None),
    ]
    for (suite, case), name, unit, value, x in figures:
        key = FigureKey(suite, case, name, unit, x=x)
        results.add(key, "hexlm", value, is_warm_up=False)
    return results


def assert_equal(found: Facts, expected: Facts) -> None:
    """To the last digits of its times."""
    assert asdict(found) == pytest.approx(asdict(expected))


def test_a_benchmark_becomes_facts_with_exact_costs() -> None:
    decode, prefill, concurrent, arrivals = facts_of(decode_results(), MACHINE)
    assert_equal(
        decode,
        Facts(
            "decode, context 64, 128 new",
            0.012,
            clocked_s=0.0115,
            own_s=0.001,
            weight_bytes=100e6,
            kv_bytes=128 * 10_000,
            operations=200e6,
            attention_operations=1000 * 128,
            bandwidth=10e9,
            peak=1e11,
        ),
    )
    assert prefill.operations == 512 * 150e6 + 50e6
    assert prefill.attention_operations == 1000 * 512 * 513 / 2
    assert prefill.peak == 2e11
    assert concurrent.step_s == pytest.approx(0.02)
    assert concurrent.own_s == pytest.approx(0.004)
    assert concurrent.operations == 8 * 200e6
    assert arrivals.step_s == pytest.approx(0.2)
    assert arrivals.queue_s == pytest.approx(0.7)
    bounds = [explain(facts).bound for facts in (decode, prefill, concurrent, arrivals)]
    assert bounds == [Bound.BANDWIDTH, Bound.COMPUTE, Bound.BANDWIDTH, Bound.QUEUEING]


def test_a_step_by_the_engines_clock_is_nearer_to_the_limit() -> None:
    decode, prefill, *_ = facts_of(decode_results(), MACHINE)
    assert decode.ratio == pytest.approx(0.010128 / 0.012)
    assert decode.clocked_ratio == pytest.approx(0.010128 / 0.0115)
    assert "0.84 of the limit (0.88 by the engine's own clock)" in explain(decode).numbers
    assert prefill.clocked_ratio is None


def test_without_the_models_files_or_the_machines_limits_it_says_so() -> None:
    results = decode_results()
    assert {explain(f).bound for f in facts_of(results, None)} == {Bound.UNKNOWN, Bound.QUEUEING}
    del results.targets["hexlm"]["cost"]
    assert explain(facts_of(results, MACHINE)[1]).bound is Bound.UNKNOWN


def test_a_roofline_is_kept_and_the_better_of_two_counts() -> None:
    assert read_roofline(roofline_record(MACHINE)) == MACHINE
    slower = replace(MACHINE, bandwidth_bytes_per_s=9e9, operations_per_s={(4, 1): 3e11})
    assert better_of(slower, MACHINE).bandwidth_bytes_per_s == 10e9
    records = {"begin": roofline_record(MACHINE), "end": roofline_record(MACHINE)}
    assert recorded_roofline(records) == MACHINE
    assert recorded_roofline({}) is None
    assert roofline_lines(MACHINE)[1:3] == [
        "memory, read: 10.0 GB/s",
        "4-bit weights, 1 row a load: 100 G operations/s",
    ]
