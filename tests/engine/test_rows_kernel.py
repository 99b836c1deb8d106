"""Rows by index: copies and unpacked rows equal numpy's."""

from __future__ import annotations

import numpy as np
import pytest

from engine.export.packing import PackedMatrix, unpack
from engine.rows_kernel import copy_rows, unpack_rows
from tests.batches import int32

pytestmark = pytest.mark.usefixtures("kernels")
ROWS = int32([5, 0, 6, 5])


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
    unpack_rows(data, scales, bits, ROWS, out)
    assert np.array_equal(out, unpack(PackedMatrix(bits, data, scales))[ROWS])
