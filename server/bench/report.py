"""The figures as rows of text, for the terminal and for Markdown. Pure; draws nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from server.bench.comparison import Comparison
from server.bench.distribution import Spread, advantage
from server.bench.results import FigureKey, Results, Samples

MISSING = "–"


@dataclass(frozen=True, slots=True)
class TextTable:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def number(value: float) -> str:
    """Three significant digits, and whole numbers from 1,000 on."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == 0:
        return "0"
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e" in text and abs(value) >= 1 else text


def shown(spread: Spread | None) -> str:
    """Median and spread: "12.1 (11.9–12.6)"; one value has no spread."""
    if spread is None:
        return MISSING
    if spread.count == 1:
        return number(spread.median)
    return f"{number(spread.median)} ({number(spread.low)}–{number(spread.high)})"


def suite_tables(results: Results) -> list[TextTable]:
    """One table per suite; with several servers, the last column says how many times better the
    first one is than the best of the others."""
    by_suite: dict[str, list[tuple[FigureKey, dict[str, Samples]]]] = {}
    for key, targets in results.figures.items():
        by_suite.setdefault(key.suite, []).append((key, targets))
    names = tuple(results.targets)
    ratio = (f"{names[0]} is better by",) if len(names) > 1 else ()
    return [
        TextTable(
            suite,
            ("case", "figure", "unit", *names, "warm-up", *ratio),
            tuple(_row(key, targets, names) for key, targets in figures),
        )
        for suite, figures in by_suite.items()
    ]


def _row(key: FigureKey, targets: Mapping[str, Samples], names: Sequence[str]) -> tuple[str, ...]:
    samples = [targets.get(name) for name in names]
    spreads = [each.spread if each else None for each in samples]
    first = samples[0]
    warm_up = number(first.warm_up[0]) if first and first.warm_up else MISSING
    row = (key.case, key.name, key.unit, *map(shown, spreads), warm_up)
    return row if len(names) < 2 else (*row, _ratio(key, spreads))


def _ratio(key: FigureKey, spreads: Sequence[Spread | None]) -> str:
    ours, *others = [spread.median if spread else None for spread in spreads]
    theirs = best_of([each for each in others if each is not None], key.is_lower_better)
    if ours is None or theirs is None:
        return MISSING
    return f"{number(advantage(ours, theirs, is_lower_better=key.is_lower_better))} x"


def best_of(values: Sequence[float], is_lower_better: bool) -> float | None:
    if not values:
        return None
    return min(values) if is_lower_better else max(values)


def comparison_table(comparison: Comparison) -> TextTable:
    rows = tuple(
        (
            change.key.suite,
            change.key.case,
            f"{change.key.name}, {change.key.unit}",
            shown(change.old),
            shown(change.new),
            f"{number(change.gain)} x",
            change.verdict,
        )
        for change in comparison.changes
    )
    columns = ("suite", "case", "figure", "old", "new", "better by", "")
    return TextTable("against the older run", columns, rows)


def fact_lines(results: Results) -> Iterator[str]:
    """The machine, the servers, how it was measured, and what has no figure."""
    machine = results.machine
    memory_gib = machine.get("memory_bytes", 0) / 1024**3
    yield (
        f"{machine.get('cpu')}, {machine.get('cores')} cores, {memory_gib:.0f} GiB, "
        f"{machine.get('os')}"
    )
    for name, facts in results.targets.items():
        told = {key: value for key, value in facts.items() if not isinstance(value, dict)}
        yield f"{name}: " + ", ".join(f"{key} {value}" for key, value in told.items())
    settings = results.settings
    yield (
        f"rounds: {settings.get('rounds')}, after {settings.get('warm_ups')} of warm-up; shown are "
        "medians (quartiles, or extremes of fewer than 4 rounds)"
    )
    for name, value in results.power.items():
        yield f"{name.replace('_', ' ')}: {value if isinstance(value, str) else number(value)}"
    if not results.is_complete:
        yield "the run was ended early"
    for note in results.notes:
        where = ": ".join(part for part in (note.target, note.suite, note.case) if part)
        yield f"{where}: {note.reason}"


def to_markdown(results: Results, comparison: Comparison | None = None) -> str:
    parts = ["# hexlm bench", "", *(f"- {line}" for line in fact_lines(results))]
    tables = suite_tables(results)
    if comparison is not None:
        tables.append(comparison_table(comparison))
    for table in tables:
        parts += ["", f"## {table.title}", "", *markdown_table(table)]
    if comparison is not None:
        parts += ["", *(f"- {line}" for line in comparison.differences)]
    return "\n".join(parts) + "\n"


def markdown_table(table: TextTable) -> Iterator[str]:
    yield _markdown_row(table.columns)
    yield _markdown_row(["---"] * len(table.columns))
    for row in table.rows:
        yield _markdown_row(row)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
