"""What a long load must not leave behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench.soak_verdict import Sample, judge

MB = 1_000_000


def samples_of(*resident_mb: float, every_s: float = 100.0) -> list[Sample]:
    """One a `every_s`, with 100 requests between two; a quarter of the memory is the server's."""
    return [
        Sample(i * every_s, 100 * i, int(mb * MB / 4), int(mb * MB) * 3 // 4, 20, 30, 500)
        for i, mb in enumerate(resident_mb)
    ]


def test_growth_before_the_load_has_settled_does_not_count() -> None:
    verdict = judge(samples_of(100, 300, 390, 400, 404, 400, 400))
    assert verdict.from_s == 300
    assert verdict.growth == pytest.approx(0.01)
    assert verdict.is_flat and verdict.is_good


def test_a_peak_counts_though_it_goes_away() -> None:
    verdict = judge(samples_of(100, 300, 390, 400, 409, 400, 400))
    assert verdict.growth == pytest.approx(0.0225)
    assert not verdict.is_good
    assert any("GROWS" in line for line in verdict.lines())
    assert list(verdict.lines())[-1] == "BAD"


def test_the_trend_is_per_thousand_requests_after_that() -> None:
    rising = judge(samples_of(1, 1, 1, 400, 401, 402, 403))
    assert rising.slope_bytes == pytest.approx(10 * MB)
    assert "its trend: +10.00 MB per 1,000 requests: rises" in list(rising.lines())


def test_of_a_short_run_the_second_half_counts() -> None:
    verdict = judge(samples_of(100, 200, 300, 301, 302, every_s=10.0))
    assert verdict.from_s == 20
    assert verdict.growth == pytest.approx(2 / 300)


def test_lost_blocks_and_errors_are_bad() -> None:
    good = samples_of(100, 100, 100, 100, 100)
    assert judge(good).is_good
    leaked = judge([*good[:-1], replace(good[-1], num_free_blocks=499)])
    assert (leaked.num_leaked_blocks, leaked.is_flat, leaked.is_good) == (1, True, False)
    failed = judge([*good[:-1], replace(good[-1], num_errors=1)])
    assert not failed.is_good
    assert "errors: 1" in list(failed.lines())


def test_files_and_threads_are_told() -> None:
    good = samples_of(100, 100, 100, 100, 100)
    more = judge([*good[:-1], replace(good[-1], num_files=33, num_threads=21)])
    assert "files and threads more than then: 3, 1" in list(more.lines())


def test_one_sample_is_no_run() -> None:
    with pytest.raises(ValueError, match="one sample"):
        judge(samples_of(100))
