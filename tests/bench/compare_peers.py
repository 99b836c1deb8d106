"""hexlm against other servers on this machine: same GGUF file, 2 threads each, in turn in one run,
over HTTP; and which bars are met.

    hexlm pull smollm2-135m-instruct
    python -m tests.bench.compare_peers --peer llama-server --peer openvino-genai \\
        --only decode-64,prefill-512 [--rounds 5] [--json FILE] [--plots FOLDER]

Peers are installed into the user's cache folder at their first use. Servers are started anew for
each setup that the chosen bars need, since a peer divides its context among its slots. Judges
nothing but whether a bar is met.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from server.bench.bench_facts import facts_of
from server.bench.errors import BenchError
from server.bench.kv_use import kv_bytes_per_token
from server.bench.model_cost import find_cost
from server.bench.plots import check_matplotlib, draw, plots_of
from server.bench.report import fact_lines, markdown_table, suite_tables
from server.bench.results import FigureKey, Results, to_json
from server.bench.roofline_record import recorded_roofline
from server.bench.run import Progress
from server.bench.server_process import RunningServer
from server.bench.session import BenchSettings, Endpoint, new_results, run_bench
from server.cli.bench import bench_progress, drawn
from server.cli.serve import interrupted_by_sigterm
from server.model_store import ModelStore
from tests.bench import bars
from tests.bench.bars import OWN, Bar, Setup
from tests.bench.first_token import seconds_to_first_token
from tests.bench.kv_capacity import sequences_of_f32
from tests.bench.peers.environment import NUM_THREADS
from tests.bench.peers.table import PEERS
from tests.bench.saturation import FIRST_RATE, highest_held, saturating_rate
from tests.bench.servers import downloaded_gguf, start_hexlm

MODEL = "smollm2-135m-instruct"
LONG_CONTEXT, MODEL_LIMIT = 8448, 8192
SEARCH_S, ARRIVALS_S = 10.0, 20.0
_PLAIN = '[speculation]\nmethod = "off"\n'
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Servers:
    """`num_slots` of `context` tokens each, of which `max_length` are used; hexlm's options."""

    num_slots: int
    context: int
    max_length: int
    options: tuple[str, ...] = ("--kv-memory", "1GiB")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared and how; `options` are the command line's. Fills `results`."""

    bars: Sequence[Bar]
    options: argparse.Namespace
    results: Results
    folder: Path
    progress: Progress

    @property
    def peers(self) -> list[str]:
        return list(self.options.peer)

    def run(self) -> None:
        """Raises BenchError, KeyboardInterrupt; what is measured by then is in `results`."""
        for setup, servers in setups().items():
            cases = bars.cases_for(self.bars, setup)
            wants_goodput = any(bar.case == bars.SATURATED and bar.setup is setup
                                for bar in self.bars)  # fmt: skip
            if cases or wants_goodput:
                with self._running(servers) as endpoints:
                    if cases:
                        self._measure(self._settings(endpoints, cases, servers, setup))
                    if wants_goodput:
                        self._measure_goodput(endpoints)
        if any(bar.setup is Setup.START for bar in self.bars):
            self._measure_starts()
        if any(bar.setup is Setup.COMPUTED for bar in self.bars):
            self._compute()

    @contextlib.contextmanager
    def _running(self, servers: Servers) -> Iterator[tuple[Endpoint, ...]]:
        with contextlib.ExitStack() as stack:
            endpoints = []
            for name, start in self._starts(servers).items():
                self.progress(f"starting {name}", 0, 0)
                server = start()
                stack.callback(server.stop)
                url = f"http://127.0.0.1:{server.port}"
                endpoints.append(Endpoint(name, url, pid=server.pid))
            own = replace(endpoints[0], cost=find_cost(ModelStore().open(MODEL)))
            yield (own, *endpoints[1:])

    def _starts(self, servers: Servers) -> dict[str, Callable[[], RunningServer]]:
        """hexlm first."""
        options = servers.options
        if self.options.plain:
            config = self.folder / "plain.toml"
            config.write_text(_PLAIN, encoding="utf-8")
            options += ("--config", str(config))
        gguf, size = downloaded_gguf(MODEL), (servers.num_slots, servers.context)
        return {
            OWN: partial(start_hexlm, self.folder, "--model", MODEL, *options),
            **{name: partial(PEERS[name], self.folder, gguf, *size) for name in self.peers},
        }

    def _settings(
        self, endpoints: tuple[Endpoint, ...], cases: tuple[str, ...], servers: Servers,
        setup: Setup,
    ) -> BenchSettings:  # fmt: skip
        needs_limits = any(bar.setup is setup and bar.figure == bars.OF_LIMIT for bar in self.bars)
        return BenchSettings(
            endpoints,
            tuple(dict.fromkeys(case.partition(":")[0] for case in cases)),
            self.options.rounds,
            seed=self.options.seed,
            roofline_threads=NUM_THREADS if needs_limits else 0,
            max_length=servers.max_length,
            cases=cases,
        )

    def _measure(self, settings: BenchSettings) -> None:
        found = new_results(settings)
        try:
            run_bench(settings, found, self.progress)
        finally:
            self._add_roofline(found)
            self.results.merge(found)

    def _add_roofline(self, found: Results) -> None:
        for facts in facts_of(found, recorded_roofline(found.roofline)):
            for figure, ratio in (
                (bars.OF_LIMIT, facts.clocked_ratio), (bars.SEEN_OF_LIMIT, facts.ratio)
            ):  # fmt: skip
                if ratio is not None:
                    key = FigureKey("roofline", facts.what, figure, "", is_lower_better=False)
                    found.add(key, OWN, ratio, is_warm_up=False)

    def _measure_goodput(self, endpoints: tuple[Endpoint, ...]) -> None:
        """Seeks the rate with short loads, each server alone; measures at it with longer ones."""
        rates: Sequence[float] = self.options.rate or ()
        if not rates:
            held = {}
            for endpoint in endpoints:
                self._kept(endpoint, FIRST_RATE)  # A warm-up.
                held[endpoint.name] = highest_held(partial(self._kept, endpoint))
                key = _key(bars.HELD, "rate", "/s", is_lower_better=False)
                self.results.add(key, endpoint.name, held[endpoint.name].rate, is_warm_up=False)
            peers = {name: each for name, each in held.items() if name != OWN}
            rates = (saturating_rate(peers or held),)
        for rate in rates:
            self._measure(self._arrivals(endpoints, rate, ARRIVALS_S, self.options.rounds))
        self._name_saturated(rates[0])

    def _kept(self, endpoint: Endpoint, rate: float) -> float:
        settings = self._arrivals((endpoint,), rate, SEARCH_S, rounds=1)
        found = new_results(settings)
        run_bench(settings, found, self.progress)
        self.results.merge(found)
        for key, targets in found.figures.items():
            if key.name == "kept objectives":
                return targets[endpoint.name].rounds[0] / 100
        raise BenchError(f"{endpoint.name}: {found.notes[0].reason}")

    def _arrivals(
        self, endpoints: tuple[Endpoint, ...], rate: float, seconds: float, rounds: int
    ) -> BenchSettings:
        return BenchSettings(
            endpoints,
            ("arrivals",),
            rounds,
            seed=self.options.seed,
            rates=(rate,),
            cases=(f"arrivals: Poisson, {rate:g}/s",),
            warm_ups=0,
            arrivals_s=seconds,
        )

    def _name_saturated(self, rate: float) -> None:
        """The figure that the bar is about, whatever the rate was."""
        for key, targets in list(self.results.figures.items()):
            if (key.suite, key.name, key.x) == ("arrivals", "goodput", rate):
                found = _key(bars.SATURATED, "goodput", "/s", is_lower_better=False)
                self.results.figures[found] = dict(targets)

    def _measure_starts(self) -> None:
        """In turn; the first round of each is a warm-up."""
        starts = self._starts(setups()[Setup.LONG])
        key = _key(bars.FIRST_TOKEN, "first token", "s")
        for number in range(1 + self.options.rounds):
            for name, start in starts.items():
                self.progress(f"start of {name}", number, 1 + self.options.rounds)
                self.results.targets.setdefault(name, {})
                took_s = seconds_to_first_token(start)
                self.results.add(key, name, took_s, is_warm_up=number == 0)

    def _compute(self) -> None:
        self.results.targets.setdefault(OWN, {})
        for kv_format, factor in sequences_of_f32(ModelStore().open(MODEL).config).items():
            key = _key(bars.CAPACITY, f"{kv_format} of f32", "x", is_lower_better=False)
            self.results.add(key, OWN, factor, is_warm_up=False)


def _key(full_name: str, figure: str, unit: str, is_lower_better: bool = True) -> FigureKey:
    suite, _, case = full_name.partition(": ")
    return FigureKey(suite, case, figure, unit, is_lower_better)


def setups() -> dict[Setup, Servers]:
    """For the memory bar, hexlm has pages for no more tokens than the model can hold."""
    kv_bytes = kv_bytes_per_token(ModelStore().open(MODEL).config)["int8"] * MODEL_LIMIT
    exact = ("--kv-format", "int8", "--kv-memory", f"{-(-kv_bytes // _MIB) + 1}MiB")
    return {
        Setup.LONG: Servers(1, LONG_CONTEXT, MODEL_LIMIT),
        Setup.SERVING: Servers(32, 2304, 2304),
        Setup.MEMORY: Servers(1, LONG_CONTEXT, MODEL_LIMIT, exact),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.compare_peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="may be repeated")
    parser.add_argument("--only", default="", help="names of bars, with commas between them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, action="append", help="do not seek it: use this one")
    parser.add_argument("--plain", action="store_true", help="hexlm without speculation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything, as hexlm bench --out does")
    parser.add_argument("--plots", type=Path, help="draw plots into this folder")
    options = parser.parse_args()
    options.peer = list(dict.fromkeys(options.peer or ["xllamacpp"]))
    options.only = [name for name in options.only.split(",") if name]
    return options


def main() -> None:
    options = parse()
    failure: BaseException | None = None
    try:
        chosen = bars.chosen(options.only)
        if options.plots:
            check_matplotlib()
    except (ValueError, BenchError) as error:
        sys.exit(str(error))
    settings = BenchSettings((), rounds=options.rounds, seed=options.seed)
    results = new_results(settings)
    with (
        interrupted_by_sigterm(),
        tempfile.TemporaryDirectory() as folder,
        bench_progress(Console(stderr=True)) as progress,
    ):
        try:
            Comparison(chosen, options, results, Path(folder), progress).run()
            results.is_complete = True
        except (BenchError, FileNotFoundError, KeyboardInterrupt) as error:
            failure = error
    show(results, chosen, options)
    if failure is not None:
        sys.exit(str(failure) or "ended early")


def show(results: Results, chosen: Sequence[Bar], options: argparse.Namespace) -> None:
    console = Console(width=160, highlight=False)
    for table in suite_tables(results):
        console.print(drawn(table))
    for line in fact_lines(results):
        console.print(line, markup=False, soft_wrap=True)
    table = bars.bar_table(bars.find(chosen, results), options.peer)
    console.print("\n".join(markdown_table(table)), markup=False, soft_wrap=True)
    if options.json:
        options.json.write_text(to_json(results), encoding="utf-8")
    if options.plots:
        draw(plots_of(results), options.plots)


if __name__ == "__main__":
    main()
