"""What is timed is the whole product, by every thread; no time is compared."""

from __future__ import annotations

import numpy as np
import pytest

from engine.kernels.panel_matrix import PanelMatrix
from engine.kernels.panel_tiles import STREAMS
from engine.product_timing import Products, together
from engine.roofline import FORMS, NUM_INPUTS, NUM_PANELS, NUM_ROWS, matrix_of_ones


@pytest.mark.parametrize("bits", FORMS)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("streams", STREAMS)
def test_rows_of_ones_times_ones(bits: int, num_rows: int, streams: int) -> None:
    products = Products([matrix_of_ones(FORMS[bits])], num_rows, streams)
    assert products.run(3) == 3 * products.operations
    assert (products.out[:num_rows] == NUM_INPUTS).all()
    assert products.operations == 2 * num_rows * 16 * NUM_PANELS * NUM_INPUTS


def test_matrices_of_other_sizes_follow_each_other() -> None:
    whole = matrix_of_ones(FORMS[4])
    inputs = np.ascontiguousarray(whole.data[:, : NUM_INPUTS // 64])
    half = PanelMatrix(whole.form, whole.num_rows, inputs)
    few = PanelMatrix(whole.form, 16, whole.data[:1])
    products = Products([whole, half, few], 1)
    assert products.run() == 2 * 16 * NUM_INPUTS * (NUM_PANELS + NUM_PANELS / 2 + 1)
    assert (products.out[0, :16] == NUM_INPUTS).all()
    assert (products.out[0, 16:] == NUM_INPUTS / 2).all()


def test_all_work_is_counted() -> None:
    done: list[int] = []

    def work(amount: int) -> float:
        done.append(amount)
        return amount * 1e9

    assert together([lambda: work(1), lambda: work(2), lambda: work(4)]) > 0
    assert sorted(done) == [1, 2, 4]
