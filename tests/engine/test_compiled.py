"""Kernels count no references: the option that says so is not a public one of numba's."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.compiled import compiled


def first_of_rows(x: Any) -> Any:
    total = 0.0
    for i in range(x.shape[0]):
        row = x[i]
        total += row[0]
    return total


def calls_that_count(function: Any) -> int:
    """Of numba's runtime, which keeps the counts, in all the code of a function and its callers."""
    assert function(np.ones((3, 4), np.float32)) == 3
    return sum(text.count("NRT_") for text in function.inspect_asm().values())


def test_no_references_are_counted() -> None:
    assert calls_that_count(compiled(first_of_rows)) == 0


def test_numba_counts_them_by_itself() -> None:
    assert calls_that_count(numba.njit(nogil=True)(first_of_rows)) > 0
