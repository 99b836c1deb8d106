"""Latencies of answers: chunks are not tokens."""

from __future__ import annotations

import pytest

from server.bench.timing import (
    Objectives,
    Timing,
    aggregate_rate,
    decode_rate,
    goodput,
    latency_percentiles,
)

PLAIN = Timing((0.5, 0.6, 0.8), 0.9, 10, 3, 0)
SPECULATED = Timing((0.5, 0.6, 0.7), 0.7, 10, 9, 0)


def test_time_per_token_counts_the_tokens_of_the_usage() -> None:
    assert PLAIN.ttft_s == 0.5
    assert PLAIN.itl_s == pytest.approx((0.1, 0.2))
    assert PLAIN.tpot_s == pytest.approx(0.15)
    assert SPECULATED.tpot_s == pytest.approx(0.2 / 8)
    assert decode_rate(SPECULATED) == pytest.approx(40)


def test_without_a_usage_chunks_stand_in() -> None:
    assert Timing((0.1, 0.2), 0.2).num_tokens == 2


def test_one_token_has_no_time_per_token() -> None:
    assert Timing((0.1,), 0.1, 1, 1).tpot_s is None
    assert decode_rate(Timing((0.1,), 0.1, 1, 1)) is None
    assert "TPOT" not in latency_percentiles([Timing((0.1,), 0.1, 1, 1)])


def test_goodput_counts_only_what_kept_both_objectives() -> None:
    objectives = Objectives(ttft_s=0.6, itl_p95_s=0.15)
    late = Timing((0.7, 0.71), 0.71, 1, 2)
    assert PLAIN.meets(objectives) is False
    assert SPECULATED.meets(objectives) is True
    assert late.meets(objectives) is False
    assert goodput([PLAIN, SPECULATED, late], objectives, 2.0) == 0.5


def test_percentiles_are_over_all_answers() -> None:
    found = latency_percentiles([PLAIN, SPECULATED])
    assert found["TTFT"] == {0.5: 0.5, 0.95: 0.5, 0.99: 0.5}
    assert found["total"][0.5] == pytest.approx(0.8)
    assert found["ITL"][0.5] == pytest.approx(0.1)


def test_the_rate_of_many_is_over_the_wall() -> None:
    assert aggregate_rate([PLAIN, SPECULATED], 2.0) == 6.0
