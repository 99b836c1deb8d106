"""The limits of a machine are positive and made of what they say; no time is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import roofline
from engine.kernels.panel_tiles import TILE_ROWS
from engine.roofline import FORMS, TileOperands, choose_buffer_bytes, last_cache_bytes


@pytest.mark.parametrize("bits", FORMS)
@pytest.mark.parametrize("num_rows", [1, TILE_ROWS])
def test_the_work_that_is_timed_is_a_matrix_product(bits: int, num_rows: int) -> None:
    operands = TileOperands(FORMS[bits], num_rows)
    roofline._tile_repeater()(*operands.arguments, 1)
    assert (operands.out == roofline.NUM_INPUTS).all()
    outputs = roofline.NUM_PANELS * 16
    assert operands.operations == 2 * num_rows * outputs * roofline.NUM_INPUTS


def test_all_figures_are_there() -> None:
    found = roofline.measure_roofline(2, seconds=0.01, buffer_bytes=1 << 20)
    assert (found.num_threads, found.buffer_bytes) == (2, 1 << 20)
    assert found.bandwidth_bytes_per_s > 0
    assert set(found.operations_per_s) == {(4, 1), (4, 8), (8, 1), (8, 8)}
    assert all(rate > 0 for rate in found.operations_per_s.values())
    assert found.peak(4, 1) == found.operations_per_s[4, 1]
    assert found.peak(4, 2) == found.operations_per_s[4, 8]
    assert found.peak(32, 100) == found.operations_per_s[8, 8]


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
