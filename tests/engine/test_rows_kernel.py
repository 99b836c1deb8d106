"""Rows by index: copies and unpacked rows equal numpy's."""

from __future__ import annotations

import numpy as np
import pytest

from engine.export.packing import PackedMatrix, unpack
from engine.kernels.rows_kernel import copy_rows, unpack_rows
from tests.batches import int32

pytestmark = pytest.mark.usefixtures("kernels")
ROWS = int32([5, 0, 6, 5])
NO_ZERO_POINTS = np.zeros((1, 0), np.uint8)


def test_rows_are_copied() -> None:
    source = np.random.default_rng(0).standard_normal((7, 33), np.float32)
    out = np.zeros((4, 33), np.float32)
    copy_rows(source, ROWS, out)
    assert np.array_equal(out, source[ROWS])


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_unpacked(bits: int) -> None:
    rng = np.random.default_rng(bits)
    data = rng.integers(0, 256, (7, 3, 4 * bits), np.uint8)
    scales = rng.standard_normal((7, 3), np.float32)
    out = np.zeros((4, 3 * 32), np.float32)
    unpack_rows(data, scales, NO_ZERO_POINTS, bits, ROWS, out)
    assert np.array_equal(out, unpack(PackedMatrix(bits, data, scales))[ROWS])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("block_size", "num_blocks", "cols"), [(32, 5, 160), (64, 2, 101)])
def test_rows_with_zero_points_are_unpacked(
    bits: int, block_size: int, num_blocks: int, cols: int
) -> None:
    rng = np.random.default_rng(bits)
    matrix = PackedMatrix(
        bits=bits,
        data=rng.integers(0, 256, (7, num_blocks, block_size * bits // 8), np.uint8),
        scales=rng.standard_normal((7, num_blocks), np.float32),
        block_size=block_size,
        zero_points=rng.integers(0, 256, (7, -(-num_blocks * bits // 8)), np.uint8),
        columns=cols,
    )
    out = np.zeros((4, cols), np.float32)
    unpack_rows(matrix.data, matrix.scales, matrix.zero_points, bits, ROWS, out)
    assert np.array_equal(out, unpack(matrix)[ROWS])
