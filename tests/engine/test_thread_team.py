"""Who takes what: every item once, whoever comes when."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.thread_team import COUNTER_BYTES, Turns, next_item, num_chunks


class Team:
    def __init__(self, num_threads: int) -> None:
        self._counters = np.zeros(num_threads * COUNTER_BYTES // 8, np.int64)
        address = self._counters.ctypes.data
        self.turns = [Turns(part, num_threads, address) for part in range(num_threads)]
        self.stretches = [0] * num_threads

    def take(self, part: int, num_items: int) -> int:
        """The number of the item, or -1."""
        item = next_item(self.turns[part], self.stretches[part], num_items)
        self.stretches[part] = item.stretch
        return int(item.number)


@given(
    num_threads=st.integers(1, 5),
    num_items=st.integers(0, 40),
    order=st.lists(st.integers(0, 4), max_size=60),
)
def test_every_item_is_taken_once(num_threads: int, num_items: int, order: list[int]) -> None:
    team = Team(num_threads)
    parts = [part % num_threads for part in order] + [0] * (num_items + 1)
    taken = [team.take(part, num_items) for part in parts]
    assert sorted(index for index in taken if index >= 0) == list(range(num_items))
    assert taken[-1] == -1


@pytest.mark.parametrize("num_items", [1, 7, 8])
def test_each_begins_with_a_stretch_of_its_own(num_items: int) -> None:
    team, half = Team(2), -(-num_items // 2)
    assert [team.take(0, num_items) for _ in range(half)] == list(range(half))
    expected = list(range(half, num_items))
    assert [team.take(1, num_items) for _ in range(num_items - half)] == expected


def test_who_has_nothing_left_helps_the_others() -> None:
    team = Team(3)
    assert [team.take(1, 6) for _ in range(7)] == [2, 3, 4, 5, 0, 1, -1]
    assert team.take(0, 6) == -1


@pytest.mark.parametrize(("num_items", "count"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_the_last_chunk_may_be_smaller(num_items: int, count: int) -> None:
    assert num_chunks(num_items, 4) == count
