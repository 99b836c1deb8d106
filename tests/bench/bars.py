"""The bars that hexlm is measured against, and whether figures meet them. Pure.

A figure is found in the results by the full name of its case and its own name. Knows no servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from server.bench.distribution import advantage
from server.bench.report import MISSING, TextTable, best_of, number
from server.bench.results import FigureKey, Results

OWN = "hexlm"


class Setup(StrEnum):
    """Which servers a bar needs, or none."""

    LONG = "one slot, long context"
    SERVING = "many slots"
    MEMORY = "one slot, fresh"
    START = "started anew each time"
    COMPUTED = "none"


class Kind(StrEnum):
    BEST_PEER = "times the best peer"
    AT_LEAST = "at least"
    AT_MOST = "at most"
    SHOWN = "no bar"


@dataclass(frozen=True, slots=True)
class Bar:
    """`name` chooses it on the command line; `limit` is in the figure's unit, or a factor."""

    name: str
    title: str
    setup: Setup
    case: str
    figure: str
    kind: Kind
    limit: float = 0.0


SATURATED = "goodput: at saturation"
HELD = "goodput: highest rate held"
ROOFLINE_1 = "roofline: decode, context 64, 128 new"
ROOFLINE_8 = "roofline: concurrency, 8 streams"
OF_LIMIT = "of the limit"
SEEN_OF_LIMIT = "of the limit, as a client sees it"
FIRST_TOKEN = "start: again"
CAPACITY = "KV capacity: 1024 tokens"

_MEASURED_BY = {
    ROOFLINE_1: "decode: context 64, 128 new",
    ROOFLINE_8: "concurrency: 8 streams",
}

_L, _S = Setup.LONG, Setup.SERVING
_TIMES, _LEAST, _MOST = Kind.BEST_PEER, Kind.AT_LEAST, Kind.AT_MOST

BARS = (
    Bar("decode-64", "decode, context 64", _L, "decode: context 64, 128 new", "rate", _TIMES, 1.5),
    Bar("decode-2k", "decode, context 2K", _L, "decode: context 2048, 128 new", "rate",
        _TIMES, 1.5),
    Bar("decode-8k", "decode, context 8K", _L, "decode: context 8063, 128 new", "rate",
        _TIMES, 1.5),
    Bar("prefill-512", "prefill of 512", _L, "prefill: 512 tokens", "TTFT", _TIMES, 3.0),
    Bar("prefill-4k", "prefill of 4K", _L, "prefill: 4096 tokens", "TTFT", _TIMES, 2.5),
    Bar("streams-8", "8 streams", _S, "concurrency: 8 streams", "rate, all", _TIMES, 2.5),
    Bar("streams-32", "32 streams", _S, "concurrency: 32 streams", "rate, all", _TIMES, 2.5),
    Bar("goodput", "goodput at a rate that saturates the best peer", _S, SATURATED, "goodput",
        _TIMES, 2.0),
    Bar("goodput", "highest rate of arrivals held", _S, HELD, "rate", Kind.SHOWN),
    Bar("roofline-1", "decode step of the limit, batch 1", _L, ROOFLINE_1, OF_LIMIT, _LEAST, 0.7),
    Bar("roofline-8", "decode step of the limit, batch 8", _S, ROOFLINE_8, OF_LIMIT, _LEAST, 0.6),
    Bar("roofline-1", "the same, as a client sees it", _L, ROOFLINE_1, SEEN_OF_LIMIT, Kind.SHOWN),
    Bar("roofline-8", "the same, as a client sees it", _S, ROOFLINE_8, SEEN_OF_LIMIT, Kind.SHOWN),
    Bar("priority", "HIGH TTFT p95 under LOW load / idle", _S,
        "priority: high among 40 low streams", "under load / idle", _MOST, 1.5),
    Bar("kv-int8", "sequences of 1K in the bytes of f32, int8", Setup.COMPUTED, CAPACITY,
        "int8 of f32", _LEAST, 3.5),
    Bar("kv-int4", "sequences of 1K in the bytes of f32, int4", Setup.COMPUTED, CAPACITY,
        "int4 of f32", _LEAST, 6.5),
    Bar("agents", "ten agents with 2,000 in common: prompt KV", _S,
        "prefixes: 10 with 2000 in common", "KV against no sharing", _MOST, 25.0),
    Bar("start", "start to first token, again", Setup.START, FIRST_TOKEN, "first token",
        _MOST, 4.0),
    Bar("memory", "resident, 8K tokens", Setup.MEMORY, "memory: all processes, 8184 tokens", "peak",
        _MOST, 900.0),
    Bar("cached", "TTFT of 1,000 cached tokens, of fresh ones", _S, "prefixes: 1000 tokens again",
        "TTFT, known of fresh", _MOST, 15.0),
    Bar("step-1", "a step's own work, 1 stream", _S, "concurrency: 1 stream", "step: own work",
        _MOST, 0.3),
    Bar("step-32", "a step's own work, 32 streams", _S, "concurrency: 32 streams",
        "step: own work", _MOST, 2.0),
    Bar("cancels", "blocks lost by 32 who leave", _S, "cancels: 32 leave after 2 chunks",
        "blocks lost", _MOST, 0.0),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """A bar with what was measured: the median of each server that has one."""

    bar: Bar
    key: FigureKey
    medians: Mapping[str, float]

    @property
    def best_peer(self) -> float | None:
        peers = [value for name, value in self.medians.items() if name != OWN]
        return best_of(peers, self.key.is_lower_better)

    @property
    def ratio(self) -> float | None:
        """How many times better hexlm is than the best peer; None where one has no figure."""
        best, own = self.best_peer, self.medians.get(OWN)
        if best is None or own is None:
            return None
        return advantage(own, best, is_lower_better=self.key.is_lower_better)

    @property
    def is_met(self) -> bool | None:
        """None where the figure that it is about is missing."""
        value = self.ratio if self.bar.kind is Kind.BEST_PEER else self.medians.get(OWN)
        if value is None or self.bar.kind is Kind.SHOWN:
            return None
        return value <= self.bar.limit if self.bar.kind is Kind.AT_MOST else value >= self.bar.limit


def find(bars: Iterable[Bar], results: Results) -> list[Found]:
    """Of the bars whose figures are there, in their order."""
    keys = {(f"{key.suite}: {key.case}", key.name): key for key in results.figures}
    found = []
    for bar in bars:
        if (key := keys.get((bar.case, bar.figure))) is not None:
            samples = results.figures[key].items()
            medians = {name: each.spread.median for name, each in samples if each.spread}
            found.append(Found(bar, key, medians))
    return found


def bar_table(found: Sequence[Found], peers: Sequence[str]) -> TextTable:
    columns = ("figure", "unit", OWN, *peers, "ratio to the best", "bar", "met")
    return TextTable("bars", columns, tuple(_row(each, peers) for each in found))


def _row(found: Found, peers: Sequence[str]) -> tuple[str, ...]:
    values = [found.medians.get(name) for name in (OWN, *peers)]
    shown = (MISSING if value is None else number(value) for value in values)
    ratio = MISSING if found.ratio is None else f"{number(found.ratio)} x"
    met = {True: "yes", False: "NO", None: MISSING}[found.is_met]
    return found.bar.title, found.key.unit, *shown, ratio, _limit(found.bar), met


def _limit(bar: Bar) -> str:
    signs = {Kind.BEST_PEER: ">= {} x", Kind.AT_LEAST: ">= {}", Kind.AT_MOST: "<= {}"}
    return signs[bar.kind].format(f"{bar.limit:g}") if bar.kind in signs else MISSING


def chosen(names: Sequence[str]) -> list[Bar]:
    """Those with these names, or all. Raises ValueError for a name that no bar has."""
    known = [bar.name for bar in BARS]
    if unknown := [name for name in names if name not in known]:
        listed = ", ".join(dict.fromkeys(known))
        raise ValueError(f"there is no bar {unknown[0]!r}; the bars are {listed}")
    return [bar for bar in BARS if not names or bar.name in names]


def cases_for(bars: Iterable[Bar], setup: Setup) -> tuple[str, ...]:
    """Full names of the cases that have the figures of these bars."""
    names = [
        _MEASURED_BY.get(bar.case, bar.case)
        for bar in bars
        if bar.setup is setup and bar.case not in (SATURATED, HELD)
    ]
    return tuple(dict.fromkeys(names))
