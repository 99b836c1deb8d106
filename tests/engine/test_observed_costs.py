"""The profile corrected by what happens, and choices that neither flutter nor get stuck."""

from __future__ import annotations

from engine.observed_costs import (
    EXPLORE_EVERY,
    HYSTERESIS,
    MAX_EXPLORED,
    Factors,
    ObservedCosts,
    StickyChoice,
)
from tests.simulated_lane import profile

MEASURED_S = 1e-3


def costs() -> ObservedCosts:
    return ObservedCosts(profile(4, npu_s=MEASURED_S, cpu_s=MEASURED_S))


def test_what_was_never_observed_costs_what_was_measured() -> None:
    assert costs().seconds("npu", "middle", 8) == MEASURED_S


def test_a_lane_under_load_becomes_dearer_and_recovers() -> None:
    known = costs()
    for _ in range(40):
        known.observe("npu", "middle", 8, 3 * MEASURED_S)
    assert 2.9 * MEASURED_S < known.seconds("npu", "middle", 8) <= 3 * MEASURED_S
    assert known.seconds("cpu", "middle", 8) == MEASURED_S
    for _ in range(60):
        known.observe("npu", "middle", 8, MEASURED_S)
    assert known.seconds("npu", "middle", 8) < 1.1 * MEASURED_S


def test_other_buckets_of_the_lane_take_the_nearest_ones_factor() -> None:
    known = costs()
    for _ in range(40):
        known.observe("npu", "middle", 8, 2 * MEASURED_S)
        known.observe("npu", "middle", 512, 5 * MEASURED_S)
    assert known.seconds("npu", "middle", 16) < 2.1 * MEASURED_S
    assert known.seconds("npu", "middle", 256) > 4.5 * MEASURED_S
    assert known.seconds("npu", "head", 16) == MEASURED_S


def test_one_long_pause_is_not_a_price() -> None:
    known = costs()
    for _ in range(20):
        known.observe("npu", "middle", 8, MEASURED_S)
    known.observe("npu", "middle", 8, 1_000 * MEASURED_S)
    assert known.seconds("npu", "middle", 8) < 1.5 * MEASURED_S


def test_what_was_not_observed_for_long_is_believed_less() -> None:
    factors = Factors()
    for _ in range(50):
        factors.observe("rare", 3.0)
    for _ in range(200):
        factors.observe("frequent", 1.0)
    factors.observe("rare", 1.0)
    assert (factors.get("rare") or 0) < 2.1
    assert factors.get("never") is None


def test_a_choice_is_kept_until_another_is_clearly_cheaper() -> None:
    choice = StickyChoice()
    assert choice.choose("q", [1.0, 1.05]) == 0
    assert choice.choose("q", [1.0, 1.0 - HYSTERESIS / 2]) == 0
    assert choice.choose("q", [1.0, 1.0 - HYSTERESIS * 1.1]) == 1
    assert choice.choose("q", [0.95, 1.0 - HYSTERESIS * 1.1]) == 1, "and then that one is kept"
    assert choice.choose("other", [1.0, 2.0]) == 0


def test_what_is_promising_is_tried_before_experience_decides() -> None:
    choice, costs = StickyChoice(num_trials=2), [1.0, 1.9, 2.1]
    assert sorted(choice.choose("q", costs) for _ in range(4)) == [0, 0, 1, 1]
    assert {choice.choose("q", costs) for _ in range(50)} == {0}


def test_costs_that_tremble_do_not_make_it_flutter() -> None:
    choice = StickyChoice()
    taken = [choice.choose("q", [1.0 + 0.04 * (i % 2), 1.02]) for i in range(100)]
    assert set(taken) == {0}


def test_the_others_are_tried_now_and_then_within_the_budget() -> None:
    choice, costs = StickyChoice(), [1.0, 1.5, 1.9]
    taken = [choice.choose("q", costs) for _ in range(20 * EXPLORE_EVERY)]
    tried = [i for i in taken if i]
    assert {1, 2} == set(tried) and 15 <= len(tried) <= 20
    extra = sum(costs[i] - costs[0] for i in taken)
    assert extra <= MAX_EXPLORED * len(taken)


def test_what_is_far_dearer_is_tried_far_less_often() -> None:
    choice = StickyChoice()
    taken = [choice.choose("q", [1.0, 40.0]) for _ in range(60 * EXPLORE_EVERY)]
    assert 1 <= taken.count(1) <= 3
    assert [StickyChoice().choose("q", [1.0]) for _ in range(2 * EXPLORE_EVERY)].count(0) == 400


def test_a_lane_that_has_become_cheap_is_found_again() -> None:
    """It looked five times as dear as it is; the real cost of each call is what is observed."""
    known, choice = costs(), StickyChoice()
    for _ in range(30):
        known.observe("npu", "middle", 8, 5 * MEASURED_S)
    truth = {"cpu": 2 * MEASURED_S, "npu": MEASURED_S}
    lanes = ("cpu", "npu")
    taken = []
    for _ in range(5_000):
        lane = lanes[choice.choose("q", [known.seconds(name, "middle", 8) for name in lanes])]
        known.observe(lane, "middle", 8, truth[lane])
        taken.append(lane)
    assert set(taken[:100]) == {"cpu"} and taken[-150:].count("npu") >= 149
