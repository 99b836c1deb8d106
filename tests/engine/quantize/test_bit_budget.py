"""Who gets 8 bits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.quantize.bit_budget import Candidate, choose_wide


def candidate(key: str, num_weights: int, narrow_error: float, wide: float = 0.0) -> Candidate[str]:
    return Candidate(key, num_weights, narrow_error, wide, narrow_bits=5.0, wide_bits=9.0)


def test_the_most_error_for_the_fewest_bits_comes_first() -> None:
    few = candidate("few", 100, 0.2)
    many = candidate("many", 1000, 0.3)
    poor = candidate("poor", 100, 0.1)
    assert choose_wide([poor, many, few], max_bits=5.34) == {"few"}
    assert choose_wide([poor, many, few], max_bits=5.67) == {"few", "poor"}
    assert choose_wide([poor, many, few], max_bits=9.0) == {"few", "poor", "many"}


def test_one_that_does_not_fit_makes_room_for_a_smaller_one() -> None:
    large = candidate("large", 900, 0.9)
    small = candidate("small", 100, 0.01)
    assert choose_wide([large, small], max_bits=5.4) == {"small"}


def test_nothing_is_widened_for_nothing() -> None:
    assert choose_wide([candidate("a", 10, 0.1, wide=0.1)], max_bits=9.0) == frozenset()


@given(
    st.lists(
        st.tuples(st.integers(1, 1000), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20
    ),
    st.floats(5, 9),
)
def test_the_budget_is_kept(matrices: list[tuple[int, float, float]], max_bits: float) -> None:
    candidates = [
        candidate(str(index), size, narrow, wide)
        for index, (size, narrow, wide) in enumerate(matrices)
    ]
    chosen = choose_wide(candidates, max_bits)
    total = sum(one.num_weights for one in candidates)
    bits = sum(one.num_weights * (9.0 if one.key in chosen else 5.0) for one in candidates)
    assert bits <= max_bits * total * (1 + 1e-9)
