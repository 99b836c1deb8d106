"""Rounds, order, warm-up; servers that fail or go away; runs that are ended early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from server.bench.errors import RequestFailed
from server.bench.results import FigureKey, from_json, to_json
from server.bench.run import BenchRun, Case, Measured, Round
from server.bench.session import measure_targets
from server.bench.target import Target
from tests.server.bench.bench_rig import (
    TOKENS,
    empty_results,
    run_suites,
    settings_of,
    target_of,
)
from tests.server.bench.scripted_server import ScriptedServer, run_virtual

RATE = FigureKey("decode", "context 64, 16 new", "rate", "tokens/s", False, 64, "context tokens")


class Log:
    """A case that says who was asked in which round, and with which seed."""

    def __init__(self, fails: str = "", is_constant: bool = False) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.fails = fails
        self.case = Case("suite", "case", self.measure, is_constant=is_constant)

    async def measure(self, target: Target, this: Round) -> Sequence[Measured]:
        self.asked.append((target.name, this.number, this.seed))
        if target.name == self.fails:
            raise RequestFailed("HTTP 500: no")
        return [Measured("rounds", float(this.number), "")]


def run_log(log: Log, rounds: int = 3) -> BenchRun:
    async def job() -> BenchRun:
        targets = [target_of(ScriptedServer(), name) for name in ("hexlm", "peer")]
        run = BenchRun(targets, empty_results(), TOKENS, rounds, seed=1)
        await run.run([log.case], lambda what, done, total: None)
        return run

    return run_virtual(job)


def test_targets_take_turns_in_beginning_and_are_asked_the_same() -> None:
    log = Log()
    run_log(log)
    names = [name for name, _, _ in log.asked]
    assert names == ["peer", "hexlm", "hexlm", "peer"] * 2
    seeds = {number: {s for _, n, s in log.asked if n == number} for number in range(4)}
    assert [len(each) for each in seeds.values()] == [1] * 4
    assert len(set.union(*seeds.values())) == 4


def test_the_warm_up_is_kept_apart() -> None:
    results = run_log(Log()).results
    (targets,) = results.figures.values()
    assert targets["hexlm"].warm_up == [0.0]
    assert targets["hexlm"].rounds == [1.0, 2.0, 3.0]


def test_what_does_not_vary_is_asked_once() -> None:
    log = Log(is_constant=True)
    results = run_log(log).results
    assert len(log.asked) == 2
    (targets,) = results.figures.values()
    assert (targets["peer"].rounds, targets["peer"].warm_up) == ([0.0], [])


def test_a_case_that_fails_on_one_server_is_noted_once_and_goes_on_with_the_other() -> None:
    log = Log(fails="peer")
    results = run_log(log).results
    assert [name for name, _, _ in log.asked].count("peer") == 1
    (note,) = results.notes
    assert (note.target, note.suite, note.case) == ("peer", "suite", "case")
    assert note.reason == "HTTP 500: no"
    (targets,) = results.figures.values()
    assert targets["hexlm"].rounds == [1.0, 2.0, 3.0]


def test_two_servers_are_measured_in_one_run() -> None:
    fast, slow = ScriptedServer(is_hexlm=True, step_s=0.01), ScriptedServer(step_s=0.02)
    results = run_suites([fast, slow], "decode")
    assert list(results.targets) == ["hexlm", "peer"]
    assert results.figures[RATE]["hexlm"].rounds == pytest.approx([100, 100])
    assert results.figures[RATE]["peer"].rounds == pytest.approx([50, 50])


def test_a_server_that_goes_away_in_the_middle_leaves_the_other_ones_figures() -> None:
    results = run_suites([ScriptedServer(), ScriptedServer(fails_after=4)], "prefill", "decode")
    (note,) = results.notes
    assert (note.target, note.suite) == ("peer", "")
    assert note.reason.startswith("lost during ")
    assert results.figures[RATE]["hexlm"].rounds == pytest.approx([100, 100])
    assert "peer" not in results.figures[RATE]


def test_what_a_server_cannot_have_is_noted() -> None:
    results = run_suites([ScriptedServer()], "priority", "memory")
    reasons = {note.suite: note.reason for note in results.notes}
    assert "no priority classes" in reasons["priority"]
    assert "--pid" in reasons["memory"] or "MODEL" in reasons["memory"]
    assert results.figures == {}


def test_a_run_that_is_ended_keeps_what_is_done() -> None:
    results = empty_results()
    log = Log()

    async def interrupted(target: Target, this: Round) -> Sequence[Measured]:
        raise KeyboardInterrupt

    async def job() -> None:
        run = BenchRun([target_of(ScriptedServer())], results, TOKENS, rounds=2)
        cases = [log.case, Case("suite", "later", interrupted)]
        await run.run(cases, lambda what, done, total: None)

    with pytest.raises(KeyboardInterrupt):
        run_virtual(job)
    assert results.is_complete is False
    again = from_json(to_json(results))
    (targets,) = again.figures.values()
    assert targets["hexlm"].rounds == [1.0, 2.0]


def test_three_servers_are_gone_through_forwards_and_backwards() -> None:
    log = Log()

    async def job() -> None:
        targets = [target_of(ScriptedServer(), name) for name in ("hexlm", "a", "b")]
        run = BenchRun(targets, empty_results(), TOKENS, rounds=2, warm_ups=0)
        await run.run([log.case], lambda what, done, total: None)

    run_virtual(job)
    assert [name for name, _, _ in log.asked] == ["b", "a", "hexlm", "hexlm", "a", "b"]


def test_only_the_cases_asked_for_are_run_and_without_a_warm_up_if_so_wanted() -> None:
    results = empty_results()
    settings = replace(settings_of("prefill", "decode"), cases=("prefill: 512 tokens",), warm_ups=0)

    async def job() -> None:
        targets = [target_of(ScriptedServer())]
        await measure_targets(settings, targets, results, lambda what, done, total: None)

    run_virtual(job)
    assert {(key.suite, key.case) for key in results.figures} == {("prefill", "512 tokens")}
    assert all(not each["hexlm"].warm_up for each in results.figures.values())
    assert all(len(each["hexlm"].rounds) == 2 for each in results.figures.values())
    assert settings.record()["cases"] == ["prefill: 512 tokens"]


def test_progress_counts_every_round() -> None:
    seen: list[tuple[int, int]] = []

    async def job() -> None:
        run = BenchRun([target_of(ScriptedServer())], empty_results(), TOKENS, rounds=2)
        await run.run([Log().case], lambda what, done, total: seen.append((done, total)))

    run_virtual(job)
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
