"""The limits of a machine are positive and made of what they say; no time is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import roofline
from engine.roofline import NUM_ROWS, choose_buffer_bytes, last_cache_bytes


def test_all_figures_are_there() -> None:
    found = roofline.measure_roofline(2, seconds=0.01, buffer_bytes=1 << 20)
    assert (found.num_threads, found.buffer_bytes) == (2, 1 << 20)
    assert found.bandwidth_bytes_per_s > 0
    assert set(found.operations_per_s) == {(bits, rows) for bits in (4, 8) for rows in NUM_ROWS}
    assert all(rate > 0 for rate in found.operations_per_s.values())
    assert found.peak(4, 1) == found.operations_per_s[4, 1]
    assert found.peak(4, 3) == found.operations_per_s[4, 1]
    assert found.peak(4, 9) == found.operations_per_s[4, 8]
    assert found.peak(32, 100) == found.operations_per_s[8, 64]


def test_no_threads_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        roofline.measure_roofline(0)


def test_the_buffer_is_larger_than_the_last_cache(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "2048K", "64M", "")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert last_cache_bytes(tmp_path) == 64 * 1024**2
    assert last_cache_bytes(tmp_path / "none") == 0
    assert choose_buffer_bytes() > 0
