"""The suites of `hexlm bench` against llama.cpp's own server, and which bars are met: same GGUF
file, same machine, 2 threads each, over HTTP.

    hexlm pull smollm2-135m-instruct
    python -m tests.bench.compare_peers [--rounds 5] [--rate 4] [--json FILE]

Two runs, since the peer divides its context among its slots: one slot with a long context, then
many short ones. Judges nothing but whether a bar is met.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from server.bench.bench_facts import facts_of
from server.bench.distribution import advantage
from server.bench.model_cost import find_cost
from server.bench.report import TextTable, number, suite_tables
from server.bench.results import FigureKey, Results, to_json
from server.bench.roofline_record import recorded_roofline
from server.bench.session import BenchSettings, Endpoint, new_results, run_bench
from server.cli.bench import bench_progress, drawn
from server.model_store import ModelStore
from tests.bench.servers import NUM_THREADS, start_hexlm, start_peer

MODEL = "smollm2-135m-instruct"
LONG_SUITES = ("prefill", "decode", "latency", "long-context", "memory")
SERVING_SUITES = ("concurrency", "arrivals", "prefixes", "priority", "interference", "cancels")
LONG_CONTEXT, SHORT_CONTEXT, NUM_SLOTS = 8448, 2304, 32


@dataclass(frozen=True, slots=True)
class Bar:
    """`limit`: at least so many times better than the peer; or at most so much, if `is_own`."""

    case: str
    figure: str
    limit: float
    is_own: bool = False


BARS = (
    Bar("context 64, 128 new", "rate", 1.5),
    Bar("context 2048, 128 new", "rate", 1.5),
    Bar("context 8063, 128 new", "rate", 1.5),
    Bar("512 tokens", "TTFT", 3.0),
    Bar("4096 tokens", "TTFT", 2.5),
    Bar("8 streams", "rate, all", 2.5),
    Bar("32 streams", "rate, all", 2.5),
    Bar("Poisson, 4/s", "goodput", 2.0),
    Bar("1 stream", "step: own work", 0.3, is_own=True),
    Bar("32 streams", "step: own work", 2.0, is_own=True),
    Bar("high among 40 low streams", "under load / idle", 1.5, is_own=True),
    Bar("10 with 2000 in common", "KV against no sharing", 25.0, is_own=True),
    Bar("32 leave after 2 chunks", "blocks lost", 0.0, is_own=True),
)
ROOFLINE_BARS = {"decode, context 64, 128 new": 0.7, "concurrency, 8 streams": 0.6}


def bar_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Of the bars whose figures were measured."""
    for bar in BARS:
        for key in results.figures:
            if (key.case, key.name) == (bar.case, bar.figure):
                yield bar_row(bar, key, results)
    for facts in facts_of(results, recorded_roofline(results.roofline)):
        if (limit := ROOFLINE_BARS.get(facts.what)) and facts.ratio is not None:
            met = "yes" if facts.ratio >= limit else "NO"
            yield f"{facts.what}: of the limit", f"{facts.ratio:.2f}", f">= {limit}", met


def bar_row(bar: Bar, key: FigureKey, results: Results) -> tuple[str, ...]:
    medians = {
        name: samples.spread.median
        for name, samples in results.figures[key].items()
        if samples.spread is not None
    }
    what = f"{bar.case}: {bar.figure}"
    if bar.is_own:
        value = medians.get("hexlm", math.inf)
        shown, wanted, is_met = number(value), f"<= {bar.limit:g} {key.unit}", value <= bar.limit
    elif {"hexlm", "peer"} <= medians.keys():
        value = advantage(medians["hexlm"], medians["peer"], is_lower_better=key.is_lower_better)
        shown, wanted, is_met = f"{number(value)} x", f">= {bar.limit:g} x", value >= bar.limit
    else:
        return what, "not measured", "", "NO"
    return what, shown, wanted, "yes" if is_met else "NO"


def downloaded_gguf() -> Path:
    """The file that the bundle was imported from. Raises FileNotFoundError."""
    folder = ModelStore().downloads_dir / MODEL
    for path in folder.glob("*.gguf"):
        return path
    raise FileNotFoundError(f"no GGUF file in {folder}: run hexlm pull {MODEL}")


@contextmanager
def both_servers(num_slots: int, context: int) -> Iterator[tuple[Endpoint, Endpoint]]:
    cost = find_cost(ModelStore().open(MODEL))
    with tempfile.TemporaryDirectory() as name:
        hexlm = start_hexlm(Path(name), "--kv-memory", "1GiB")
        try:
            peer = start_peer(Path(name), downloaded_gguf(), num_slots, context)
            try:
                urls = [f"http://127.0.0.1:{server.port}" for server in (hexlm, peer)]
                yield (
                    Endpoint("hexlm", urls[0], pid=hexlm.pid, cost=cost),
                    Endpoint("peer", urls[1], pid=peer.pid),
                )
            finally:
                peer.stop()
        finally:
            hexlm.stop()


def compare(
    suites: tuple[str, ...], num_slots: int, context: int, options: argparse.Namespace
) -> Results:
    with both_servers(num_slots, context) as endpoints:
        settings = BenchSettings(
            endpoints,
            suites,
            options.rounds,
            seed=options.seed,
            rates=tuple(options.rate or (4.0,)),
            roofline_threads=NUM_THREADS,
            max_length=min(context, 8192),
        )
        results = new_results(settings)
        with bench_progress(Console(stderr=True)) as progress:
            run_bench(settings, results, progress)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="written as FILE-long.json, FILE-serving.json")
    options = parser.parse_args()
    console = Console(width=140)
    for name, suites, num_slots, context in (
        ("long", LONG_SUITES, 1, LONG_CONTEXT),
        ("serving", SERVING_SUITES, NUM_SLOTS, SHORT_CONTEXT),
    ):
        results = compare(suites, num_slots, context, options)
        for table in suite_tables(results):
            console.print(drawn(table))
        rows = tuple(bar_rows(results))
        console.print(drawn(TextTable("bars", ("figure", "result", "bar", "met"), rows)))
        if options.json:
            path = options.json.with_name(f"{options.json.stem}-{name}.json")
            path.write_text(to_json(results), encoding="utf-8")


if __name__ == "__main__":
    main()
