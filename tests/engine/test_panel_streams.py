"""How many panels are read at once: what was faster in the first steps, whatever disturbed them."""

from __future__ import annotations

from engine.panel_streams import NUM_TRIES, PanelStreams


def run(streams: PanelStreams, seconds: dict[int, list[float]]) -> list[int]:
    """The choices for steps of one token that take so long, until there are no more times."""
    left, choices = {each: list(times) for each, times in seconds.items()}, []
    while left[choice := streams.choose(1)]:
        streams.record(1, choice, left[choice].pop(0))
        choices.append(choice)
    return choices


def test_both_are_tried_in_turn_and_the_faster_one_stays() -> None:
    streams = PanelStreams((1, 4))
    choices = run(streams, {1: [2.0] * 100, 4: [3.0] * 100})
    assert choices[: 2 * NUM_TRIES] == [1, 4] * NUM_TRIES
    assert choices[2 * NUM_TRIES :] == [1] * (100 - NUM_TRIES)


def test_the_fastest_of_each_counts() -> None:
    streams = PanelStreams((1, 4))
    run(streams, {1: [2.5] * NUM_TRIES, 4: [9.0, 9.0, 2.0, 9.0, *[1.0] * (NUM_TRIES - 4)]})
    assert streams.choose(1) == 4


def test_larger_steps_teach_nothing_and_take_what_is_known() -> None:
    streams = PanelStreams((1, 4))
    for _ in range(20):
        assert streams.choose(8) == 4
        streams.record(8, 4, 0.001)
    run(streams, {1: [2.0] * NUM_TRIES, 4: [3.0] * NUM_TRIES})
    assert streams.choose(8) == streams.choose(1) == 1
