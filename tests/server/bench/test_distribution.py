"""Percentiles against numpy, spreads and advantages."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.bench.distribution import advantage, percentile, spread_of

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(VALUES, st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    expected = float(np.quantile(values, share))
    assert percentile(values, share) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_few_rounds_show_their_extremes_and_many_their_quartiles() -> None:
    few, many = spread_of([3.0, 1.0, 2.0]), spread_of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (few.low, few.median, few.high) == (1.0, 2.0, 3.0)
    assert (many.low, many.median, many.high) == (2.0, 3.0, 4.0)
    assert (many.minimum, many.maximum) == (1.0, 100.0)


def test_spreads_overlap_where_they_touch() -> None:
    assert spread_of([1.0, 2.0]).overlaps(spread_of([2.0, 3.0]))
    assert not spread_of([1.0, 2.0]).overlaps(spread_of([2.1, 3.0]))
    assert spread_of([0.0, 9.0]).overlaps(spread_of([4.0, 5.0]))


def test_an_advantage_is_above_one_whichever_direction_is_better() -> None:
    assert advantage(20.0, 10.0, is_lower_better=False) == 2.0
    assert advantage(10.0, 20.0, is_lower_better=True) == 2.0
    assert advantage(10.0, 0.0, is_lower_better=False) == math.inf
    assert advantage(0.0, 0.0, is_lower_better=True) == 1.0
