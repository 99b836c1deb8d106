"""How many threads a step gets: fewer while they only wait for each other, and all again after."""

from __future__ import annotations

from collections.abc import Callable

from engine.team_size import FIRST_PAUSE, LONGEST_PAUSE, TeamSize

Machine = Callable[[int], tuple[float, float]]


def run(team: TeamSize, machine: Machine, num_steps: int, num_tokens: int = 1) -> list[int]:
    """The sizes chosen. `machine`: threads → (seconds, share of waiting)."""
    sizes = []
    for _ in range(num_steps):
        size = team.choose(num_tokens)
        team.record(num_tokens, size, *machine(size))
        sizes.append(size)
    return sizes


def quiet(num_threads: int) -> tuple[float, float]:
    return 4.0 / num_threads, 0.1


def busy(num_threads: int) -> tuple[float, float]:
    return (4.0, 0.0) if num_threads == 1 else (10.0, 0.8)


def waiting_but_faster(num_threads: int) -> tuple[float, float]:
    return (4.0, 0.0) if num_threads == 1 else (3.0, 0.5)


def test_a_quiet_machine_never_tries_one_thread() -> None:
    assert run(TeamSize(4), quiet, 2000) == [4] * 2000


def test_a_busy_machine_goes_down_to_one_thread_and_stays() -> None:
    sizes = run(TeamSize(2), busy, 3000)
    assert sizes[:FIRST_PAUSE] == [2] * FIRST_PAUSE
    assert sizes.count(2) < FIRST_PAUSE + 16
    assert sizes[-400:].count(2) <= 1


def test_one_that_waits_and_is_faster_keeps_its_threads() -> None:
    sizes = run(TeamSize(2), waiting_but_faster, 3000)
    assert sizes.count(1) <= 12


def test_it_comes_back_when_the_machine_is_quiet_again() -> None:
    team = TeamSize(2)
    run(team, busy, 100)
    sizes = run(team, quiet, 2 * LONGEST_PAUSE)
    assert sizes[-1] == 2
    assert 2 in sizes[:300]


def test_steps_of_other_sizes_are_decided_apart() -> None:
    team = TeamSize(2)
    run(team, busy, 50, num_tokens=1)
    assert team.choose(1) == 1
    assert team.choose(512) == 2
    assert run(team, quiet, 50, num_tokens=512) == [2] * 50


def test_a_team_of_one_stays_one() -> None:
    assert run(TeamSize(1), busy, 50) == [1] * 50
