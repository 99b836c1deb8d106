"""One run of the benchmark from its options to its results: servers, roofline, power, suites.

The only module that puts the parts together. `Results` grows while it runs, so that whoever called
has what was measured even if the run is ended early.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import httpx

from engine.roofline import measure_roofline
from server.bench.machine_facts import machine_facts
from server.bench.model_cost import ModelCost
from server.bench.power import power_summary, read_power
from server.bench.probing import probe
from server.bench.results import FigureKey, Results
from server.bench.roofline_record import roofline_record
from server.bench.run import BenchRun, Plan, Progress
from server.bench.server_process import start_hexlm
from server.bench.suites.table import cases_of
from server.bench.target import TIMEOUT_S, Target
from server.bench.timing import Objectives

DEFAULT_LENGTH = 2048
"""For servers that do not say how long a sequence may be."""

LOAD_WITHIN_S = 600.0
START = FigureKey("start", "own server", "start to first answer", "s")
"""With the model imported before; the very first start on a machine also compiles kernels."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server to measure. `url` None: a hexlm of its own, started with `serve_options`.

    `configuration`: what is recorded of how it was started.
    """

    name: str
    url: str | None = None
    model: str | None = None
    pid: int | None = None
    api_key: str | None = None
    serve_options: tuple[str, ...] = ()
    cost: ModelCost | None = None
    configuration: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers. `started_s`: by `time.perf_counter`; None if it ran already."""

    endpoint: Endpoint
    url: str
    pid: int | None
    started_s: float | None = None


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """`suites` empty: all of them; `cases` empty: all of theirs, otherwise those with these full
    names ("decode: context 64, 128 new"). `roofline_threads` 0: not measured. `max_length` bounds
    every prompt. `arrivals_s`: how long requests keep coming at each of `rates`."""

    endpoints: tuple[Endpoint, ...]
    suites: tuple[str, ...] = ()
    rounds: int = 5
    is_quick: bool = False
    seed: int = 0
    rates: tuple[float, ...] = (1.0, 2.0, 4.0)
    objectives: Objectives = field(default_factory=Objectives)
    roofline_threads: int = 0
    max_length: int | None = None
    cases: tuple[str, ...] = ()
    warm_ups: int = 1
    arrivals_s: float = 20.0

    def record(self) -> dict[str, Any]:
        """What the file says; no addresses."""
        return {
            "rounds": self.rounds,
            "warm_ups": self.warm_ups,
            "seed": self.seed,
            "is_quick": self.is_quick,
            "suites": list(self.suites),
            "cases": list(self.cases),
            "rates": list(self.rates),
            "arrivals_s": self.arrivals_s,
            "objectives": asdict(self.objectives),
            "max_length": self.max_length,
        }


def new_results(settings: BenchSettings) -> Results:
    return Results(
        machine_facts(),
        settings.record(),
        datetime.now(UTC).isoformat(timespec="seconds"),
    )


def run_bench(settings: BenchSettings, results: Results, progress: Progress) -> None:
    """Fills `results`.

    Raises:
        BenchError: a server does not start or is of no use.
        KeyboardInterrupt: what is in `results` is whole, its `is_complete` False.
    """
    _measure_limits("begin", settings, results, progress)
    before = read_power()
    try:
        with _own_servers(settings.endpoints, progress) as endpoints:
            asyncio.run(_measure(settings, endpoints, results, progress))
    finally:
        results.power = power_summary(before, read_power())
    _measure_limits("end", settings, results, progress)
    results.is_complete = True


def _measure_limits(
    when: str, settings: BenchSettings, results: Results, progress: Progress
) -> None:
    if settings.roofline_threads:
        progress("the machine's limits", 0, 0)
        roofline = measure_roofline(settings.roofline_threads)
        results.roofline[when] = roofline_record(roofline)


@contextlib.contextmanager
def _own_servers(endpoints: Sequence[Endpoint], progress: Progress) -> Iterator[list[Running]]:
    """Those that were started end with the block. Raises BenchError if one does not start."""
    with contextlib.ExitStack() as stack:
        found = []
        for endpoint in endpoints:
            if endpoint.url is not None:
                found.append(Running(endpoint, base_url(endpoint.url), endpoint.pid))
                continue
            progress(f"starting {endpoint.name}", 0, 0)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            started_s = time.perf_counter()
            server = start_hexlm(folder, *endpoint.serve_options, within_s=LOAD_WITHIN_S)
            stack.callback(server.stop)
            url = f"http://127.0.0.1:{server.port}"
            found.append(Running(endpoint, url, server.pid, started_s))
        yield found


def base_url(url: str) -> str:
    """Without the "/v1" that clients of OpenAI are given."""
    return url.rstrip("/").removesuffix("/v1")


async def _measure(
    settings: BenchSettings,
    servers: Sequence[Running],
    results: Results,
    progress: Progress,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        targets = []
        for server in servers:
            endpoint = server.endpoint
            http = await stack.enter_async_context(_client(server.url, endpoint.api_key))
            target = await probe(endpoint.name, http, endpoint.model, pid=server.pid)
            if endpoint.cost is not None:
                target.info = replace(target.info, cost=asdict(endpoint.cost))
            results.targets[target.name] = target_record(target) | dict(endpoint.configuration)
            if server.started_s is not None:
                start_s = time.perf_counter() - server.started_s
                results.add(START, target.name, start_s, is_warm_up=False)
            targets.append(target)
        await measure_targets(settings, targets, results, progress)


@contextlib.asynccontextmanager
async def _client(url: str, api_key: str | None) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=TIMEOUT_S, limits=limits, trust_env=False
    ) as client:
        yield client


async def measure_targets(
    settings: BenchSettings, targets: Sequence[Target], results: Results, progress: Progress
) -> None:
    """The suites against servers that are there."""
    tokens = min((target.dialect.tokens for target in targets), key=lambda each: each.stop)
    plan = Plan(
        common_length(targets, settings.max_length),
        settings.is_quick,
        settings.rates,
        settings.objectives,
        settings.arrivals_s,
    )
    run = BenchRun(targets, results, tokens, settings.rounds, settings.seed, settings.warm_ups)
    cases = cases_of(settings.suites, plan)
    wanted = settings.cases or tuple(case.full_name for case in cases)
    await run.run([case for case in cases if case.full_name in wanted], progress)


def common_length(targets: Sequence[Target], wanted: int | None = None) -> int:
    """Tokens of a sequence that every server holds."""
    limits = [target.info.max_model_len or DEFAULT_LENGTH for target in targets]
    return min([*limits, *([wanted] if wanted else [])])


def model_name(model: str) -> str:
    """Without the folders, where a server calls its model by the path of a file."""
    is_path = PurePosixPath(model).is_absolute() or PureWindowsPath(model).is_absolute()
    return PureWindowsPath(model).name if is_path else model


def target_record(target: Target) -> dict[str, Any]:
    """What the file says of a server; no addresses."""
    return {
        "kind": target.info.kind,
        "model": model_name(target.info.model),
        "max_model_len": target.info.max_model_len,
        "prompts": str(target.dialect.kind),
        "exact_answer_lengths": target.dialect.knows_ignore_eos,
        **target.info.facts,
        "cost": target.info.cost,
    }
