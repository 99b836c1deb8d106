"""What a run of the benchmark is as data, and as the JSON file that it leaves.

The file's `version` changes when a reader of the old form would misread the new one; new keys do
not change it. Holds no host names, addresses or paths. Knows no servers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from server.bench.distribution import Spread, spread_of

FORMAT = "hexlm-bench"
VERSION = 1


class NotABenchFile(ValueError):
    """The message is one line and says what is wrong with the file."""


@dataclass(frozen=True, slots=True)
class FigureKey:
    """Which figure: `suite` and `case` say what was done, `name` what was measured of it.

    `x` is the case's place on the axis of a plot, in `x_label`; None where it has none.
    """

    suite: str
    case: str
    name: str
    unit: str
    is_lower_better: bool = True
    x: float | None = None
    x_label: str = ""


@dataclass(slots=True)
class Samples:
    """One value per round; those of the warm-up are kept apart."""

    rounds: list[float] = field(default_factory=list)
    warm_up: list[float] = field(default_factory=list)

    @property
    def spread(self) -> Spread | None:
        return spread_of(self.rounds) if self.rounds else None


@dataclass(frozen=True, slots=True)
class Note:
    """What has no figure and why; `case` "" is about the whole suite, `suite` "" about all."""

    target: str
    suite: str
    case: str
    reason: str


@dataclass(slots=True)
class Results:
    """Grows while the suites run. `targets`: the name of each server → what is known of it;
    the first one is the one that the run is about. `roofline`: `begin` and `end`."""

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    started_at: str
    targets: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: dict[FigureKey, dict[str, Samples]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    roofline: dict[str, Any] = field(default_factory=dict)
    power: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = False

    def add(self, key: FigureKey, target: str, value: float, *, is_warm_up: bool) -> None:
        samples = self.figures.setdefault(key, {}).setdefault(target, Samples())
        (samples.warm_up if is_warm_up else samples.rounds).append(value)

    def note(self, note: Note) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def merge(self, other: Results) -> None:
        """Takes over what another run on this machine has; where both have a server's figure,
        the other's is kept."""
        self.targets |= other.targets
        for key, targets in other.figures.items():
            self.figures.setdefault(key, {}).update(targets)
        for note in other.notes:
            self.note(note)
        self.roofline |= other.roofline
        self.power |= other.power


def to_json(results: Results) -> str:
    document = {
        "format": FORMAT,
        "version": VERSION,
        "started_at": results.started_at,
        "is_complete": results.is_complete,
        "settings": dict(results.settings),
        "machine": dict(results.machine),
        "targets": results.targets,
        "roofline": results.roofline,
        "power": results.power,
        "figures": [_figure(key, targets) for key, targets in results.figures.items()],
        "notes": [asdict(note) for note in results.notes],
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _figure(key: FigureKey, targets: Mapping[str, Samples]) -> dict[str, Any]:
    return {
        **asdict(key),
        "targets": {
            name: {
                "samples": samples.rounds,
                "warm_up": samples.warm_up,
                "spread": asdict(samples.spread) if samples.spread else None,
            }
            for name, samples in targets.items()
        },
    }


def from_json(text: str) -> Results:
    """Raises NotABenchFile."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise NotABenchFile(f"it is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise NotABenchFile("it is not what `hexlm bench --out` writes")
    if document.get("version") != VERSION:
        raise NotABenchFile(
            f"its version is {document.get('version')!r}, and this hexlm reads {VERSION}"
        )
    try:
        return _read(document)
    except (KeyError, TypeError, ValueError) as error:
        raise NotABenchFile(f"a part of it is damaged: {error!r}") from error


def _read(document: Mapping[str, Any]) -> Results:
    results = Results(
        document["machine"],
        document["settings"],
        document["started_at"],
        targets=dict(document["targets"]),
        notes=[Note(**note) for note in document["notes"]],
        roofline=dict(document["roofline"]),
        power=dict(document["power"]),
        is_complete=bool(document["is_complete"]),
    )
    for figure in document["figures"]:
        key = FigureKey(**{name: value for name, value in figure.items() if name != "targets"})
        results.figures[key] = {
            name: Samples([float(v) for v in each["samples"]], [float(v) for v in each["warm_up"]])
            for name, each in figure["targets"].items()
        }
    return results


def read_results(path: Path) -> Results:
    """Raises NotABenchFile naming the file, OSError."""
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, NotABenchFile) as error:
        raise NotABenchFile(f"{path} cannot be read as a benchmark: {error}") from error
