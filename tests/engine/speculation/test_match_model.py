"""What would come next if the text repeated itself: the right place, constant work, honest odds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation.match_model import ORDERS, MatchModel, MatchStatistics

pytestmark = pytest.mark.usefixtures("kernels")


def model_of(
    tokens: list[int], num_prompt: int | None = None, foretold: tuple[int, ...] = ()
) -> MatchModel:
    model = MatchModel(len(tokens) + 50, MatchStatistics(), foretold)
    model.take(tokens, len(tokens) if num_prompt is None else num_prompt)
    return model


def foretold_by(model: MatchModel, depth: int = 8) -> tuple[list[int], list[float]]:
    out, chances = np.zeros(depth, np.int32), np.zeros(depth)
    found = model.foretell(out, chances)
    return out[:found].tolist(), chances[:found].tolist()


def next_of(tokens: list[int], depth: int = 8) -> list[int]:
    return foretold_by(model_of(tokens), depth)[0]


def test_nothing_is_foretold_of_a_text_without_repeats() -> None:
    assert next_of([*range(40)]) == []
    assert next_of([]) == [] and next_of([7]) == []


def test_it_goes_on_as_it_went_on_before() -> None:
    assert next_of([1, 2, 3, 4, 5, 6, 9, 9, 1, 2], 4) == [3, 4, 5, 6]


def test_one_token_in_common_is_not_enough() -> None:
    assert next_of([1, 2, 3, 4, 8, 1]) == []


def test_the_longest_match_wins() -> None:
    """[8, 5, 6] went on with 10; [5, 6], more recently, with 20."""
    assert next_of([8, 5, 6, 10, 11, 1, 5, 6, 20, 21, 2, 8, 5, 6], 2) == [10, 11]


def test_the_most_recent_of_equals_wins() -> None:
    assert next_of([5, 6, 10, 11, 1, 5, 6, 20, 21, 2, 5, 6], 2) == [20, 21]


def test_a_copy_that_reaches_its_own_end_repeats_itself() -> None:
    assert next_of([1, 2, 3, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert next_of([4, 4, 4, 4], 5) == [4] * 5


def test_a_match_goes_on_while_tokens_come_as_foretold() -> None:
    source = [*range(100, 130)]
    model = model_of([*source, 7, 100, 101])
    for step in range(2, 20):
        assert foretold_by(model, 3)[0] == source[step : step + 3]
        model.take([source[step]], 0)


def test_behind_a_changed_token_the_copy_goes_on_at_once() -> None:
    source = [*range(100, 130)]
    model = model_of([*source, 7, *source[:10]])
    model.take([55], 0)
    assert foretold_by(model, 3)[0] == source[11:14]
    model.take(source[11:13], 0)
    assert foretold_by(model, 3)[0] == source[13:16]


def test_it_lets_go_of_a_place_that_goes_on_being_wrong() -> None:
    source = [*range(100, 130)]
    model = model_of([*source, 7, *source[:10]])
    model.take([51, 52, 53, 54, 55], 0)
    assert foretold_by(model)[0] == []


def test_chances_fall_and_grow_with_the_length_of_the_match() -> None:
    tokens = [*range(100, 140), 7]
    first = []
    for length in (2, 4, 8, 20):
        _, chances = foretold_by(model_of([*tokens, *tokens[:length]]), 6)
        assert chances == sorted(chances, reverse=True) and 0 < chances[-1] <= chances[0] < 1
        first.append(chances[0])
    assert first == sorted(first)


def test_it_learns_from_the_output_and_not_from_the_prompt() -> None:
    """A prompt that repeats itself says nothing about the answer."""
    statistics = MatchStatistics()
    repeating, before = [*range(30)] * 6, statistics.counts.copy()
    models = [MatchModel(300, statistics) for _ in range(2)]
    models[0].take(repeating, len(repeating))
    assert np.array_equal(statistics.counts, before)
    models[1].take(repeating, 30)
    of_prompt, of_output = (foretold_by(model, 1)[1][0] for model in models)
    assert of_output > of_prompt


def test_a_sequence_that_breaks_off_every_time_is_believed_less_and_less() -> None:
    model = MatchModel(2000, MatchStatistics())
    rng = np.random.default_rng(0)
    words = [rng.integers(0, 50, 3).tolist() for _ in range(20)]
    model.take([token for word in words for token in word], 60)
    first, number = 0.0, 0
    for number in range(60):
        model.take(words[int(rng.integers(20))][:2], 0)
        _, chances = foretold_by(model, 1)
        first = first or chances[0]
        model.take([1000 + number], 0)
    model.take(words[0][:2], 0)
    assert number == 59 and foretold_by(model, 1)[1][0] < first / 3


def test_one_kind_of_match_that_fails_makes_all_kinds_suspect() -> None:
    source = [*range(100, 160)]

    def chance_after(num_wrong: int) -> float:
        model = model_of([*source, 7])
        for number in range(num_wrong):
            model.take([*source[:4], 2000 + number, 3000 + number], 0)
        model.take(source[20:24], 0)
        return foretold_by(model, 1)[1][0]

    assert chance_after(0) > chance_after(1) > chance_after(4)


def test_what_one_sequence_shows_is_where_the_next_begins() -> None:
    statistics = MatchStatistics()
    repeating = [*range(12)] * 40
    before = statistics.counts.copy()
    model = MatchModel(600, statistics)
    model.take(repeating, 24)
    assert (statistics.counts != before).any()
    second = MatchModel(100, statistics)
    second.take([*range(12), *range(12)], 24)
    fresh = model_of([*range(12), *range(12)])
    assert foretold_by(second, 1)[1][0] > foretold_by(fresh, 1)[1][0]


def test_a_foretold_text_is_expected_from_the_first_token_on() -> None:
    foretold = (50, 51, 52, 53, 54, 55)
    model = model_of([1, 2, 3], foretold=foretold)
    tokens, chances = foretold_by(model)
    assert tokens == list(foretold) and chances[0] > 0.6
    model.take([50, 51, 52], 0)
    assert foretold_by(model)[0] == [53, 54, 55]
    assert model.num_tokens == 6


def test_a_foretold_text_is_found_again_after_a_detour() -> None:
    model = model_of([1, 2, 3], foretold=(50, 51, 52, 53, 54, 55))
    model.take([90, 91, 92, 93, 94, 52, 53], 0)
    assert foretold_by(model)[0] == [54, 55]


def test_a_prompt_may_come_in_parts_before_what_is_foretold() -> None:
    whole, parts = (MatchModel(60, MatchStatistics(), (50, 51, 52)) for _ in range(2))
    whole.take([1, 2, 3, 4, 50], 4)
    parts.take([1, 2], 4)
    parts.take([3, 4], 4)
    assert foretold_by(parts)[0] == [50, 51, 52]
    parts.take([50], 4)
    assert foretold_by(parts) == foretold_by(whole)


@settings(deadline=None, max_examples=150)
@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=120),
    cuts=st.lists(st.integers(0, 120), max_size=6),
    foretold=st.lists(st.integers(0, 5), max_size=20),
    num_prompt=st.integers(0, 120),
)
def test_it_does_not_matter_in_which_pieces_tokens_come(
    tokens: list[int], cuts: list[int], foretold: list[int], num_prompt: int
) -> None:
    num_prompt = min(num_prompt, len(tokens))
    whole, pieces = (MatchModel(121, MatchStatistics(), tuple(foretold)) for _ in range(2))
    whole.take(tokens, num_prompt)
    edges = sorted({0, len(tokens), *(min(cut, len(tokens)) for cut in cuts)})
    for start, end in zip(edges, edges[1:], strict=False):
        pieces.take(tokens[start:end], num_prompt)
    assert pieces.num_tokens == whole.num_tokens == len(tokens)
    assert foretold_by(pieces) == foretold_by(whole)


@settings(deadline=None, max_examples=150)
@given(tokens=st.lists(st.integers(0, 4), min_size=2, max_size=150))
def test_what_is_foretold_follows_an_earlier_occurrence(tokens: list[int]) -> None:
    """The newest tokens stand somewhere before what is foretold, or stood there before an edit."""
    found, chances = foretold_by(model_of(tokens), 4)
    assert len(found) == len(chances) and all(0 < chance <= 1 for chance in chances)
    if found:
        assert found[0] in tokens


def test_long_texts_are_taken_in_without_a_scan() -> None:
    """Twice the tokens, about twice the table look-ups: counted, not timed."""
    rng = np.random.default_rng(1)
    model = MatchModel(200_000, MatchStatistics())
    model.take(rng.integers(0, 1000, 150_000).tolist(), 150_000)
    assert model.num_tokens == 150_000
    assert min(ORDERS) == 2
