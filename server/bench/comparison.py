"""Two runs side by side: every figure that both have, and whether it changed beyond its spread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from server.bench.distribution import Spread, advantage
from server.bench.results import FigureKey, Results


@dataclass(frozen=True, slots=True)
class Change:
    """`gain`: how many times better the new one is (above 1 in either direction of the figure).
    `is_outside`: the two spreads do not touch."""

    key: FigureKey
    old: Spread
    new: Spread
    gain: float
    is_outside: bool

    @property
    def verdict(self) -> str:
        if not self.is_outside:
            return "within the spread"
        return "better" if self.gain > 1 else "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`differences`: what the two runs do not have in common, so that a change may be due to it."""

    changes: tuple[Change, ...]
    differences: tuple[str, ...]


def compare(old: Results, new: Results) -> Comparison:
    """The figures of the first server of each run, in the new one's order."""
    return Comparison(tuple(_changes(old, new)), tuple(_differences(old, new)))


def _first(results: Results) -> str:
    return next(iter(results.targets), "")


def _changes(old: Results, new: Results) -> Iterator[Change]:
    for key, targets in new.figures.items():
        here, there = targets.get(_first(new)), old.figures.get(key, {}).get(_first(old))
        before = there.spread if there else None
        after = here.spread if here else None
        if before is None or after is None:
            continue
        gain = advantage(after.median, before.median, is_lower_better=key.is_lower_better)
        yield Change(key, before, after, gain, not before.overlaps(after))


def _differences(old: Results, new: Results) -> Iterator[str]:
    pairs = (
        ("machine", old.machine, new.machine),
        ("server", old.targets.get(_first(old), {}), new.targets.get(_first(new), {})),
    )
    for what, before, after in pairs:
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                yield f"{what}: {name}: {before.get(name)} → {after.get(name)}"
    if not (old.is_complete and new.is_complete):
        yield "one of the runs was ended early"
