"""Targets over scripted servers, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from server.bench.dialect import Dialect
from server.bench.probing import probe
from server.bench.results import Results
from server.bench.run import Case, Round
from server.bench.session import BenchSettings, Endpoint, measure_targets, target_record
from server.bench.suites.table import SUITES
from server.bench.target import Target, TargetInfo
from server.bench.workloads import TokenRange
from tests.server.bench.scripted_server import ScriptedServer, run_virtual

TOKENS = TokenRange(100, 200)
ROUND = Round(7, TOKENS, 0)


def target_of(server: ScriptedServer, name: str = "hexlm") -> Target:
    """Without asking the server what it is. To be called in the loop of the test."""
    kind = "hexlm" if server.is_hexlm else "OpenAI-compatible"
    clock = asyncio.get_running_loop().time
    known = TargetInfo("small", kind, max_model_len=1024)
    return Target(name, server.client(), known, Dialect(tokens=TOKENS), clock=clock)


def measure(case: Case, server: ScriptedServer) -> dict[str, float]:
    """One round of a case: figure → value."""

    async def job() -> dict[str, float]:
        figures = await case.measure(target_of(server), ROUND)
        return {figure.name: figure.value for figure in figures}

    return run_virtual(job)


def settings_of(*suites: str, rounds: int = 2) -> BenchSettings:
    assert set(suites) <= SUITES.keys()
    endpoints = (Endpoint("hexlm", "http://scripted"),)
    return BenchSettings(endpoints, suites, rounds, is_quick=True)


def empty_results() -> Results:
    return Results({"cpu": "an abacus"}, {"rounds": 2, "warm_ups": 1}, "2026-01-01T00:00:00+00:00")


def run_suites(servers: Sequence[ScriptedServer], *suites: str, rounds: int = 2) -> Results:
    """The whole way from probing to results; the first server is "hexlm", a second "peer"."""
    results = empty_results()

    async def job() -> None:
        clock = asyncio.get_running_loop().time
        targets = []
        for name, server in zip(("hexlm", "peer"), servers, strict=False):
            target = await probe(name, server.client(), None, clock=clock)
            results.targets[name] = target_record(target)
            targets.append(target)
        settings = settings_of(*suites, rounds=rounds)
        await measure_targets(settings, targets, results, lambda what, done, total: None)

    run_virtual(job)
    return results
