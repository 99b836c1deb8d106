"""Plots of the figures that have a place on an axis, one PNG each.

What is drawn is pure data (`plots_of`); drawing needs matplotlib, the extra `plots`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from server.bench.errors import BenchError
from server.bench.results import Results

MIN_POINTS = 2


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Plot:
    """`lines`: the points of each server, by x."""

    title: str
    x_label: str
    y_label: str
    lines: dict[str, tuple[Point, ...]]

    @property
    def file_name(self) -> str:
        return (
            re.sub(r"[^a-z0-9]+", "-", f"{self.title} {self.x_label}".lower()).strip("-") + ".png"
        )


def plots_of(results: Results) -> list[Plot]:
    """One per suite, figure and axis that has at least two points."""
    found: dict[tuple[str, str, str, str], dict[str, dict[float, Point]]] = {}
    for key, targets in results.figures.items():
        if key.x is None:
            continue
        lines = found.setdefault((key.suite, key.name, key.x_label, key.unit), {})
        for target, samples in targets.items():
            if spread := samples.spread:
                point = Point(key.x, spread.median, spread.low, spread.high)
                lines.setdefault(target, {}).setdefault(key.x, point)
    return [
        Plot(f"{suite}: {name}", x_label, unit, {t: _ordered(p) for t, p in lines.items()})
        for (suite, name, x_label, unit), lines in found.items()
        if any(len(points) >= MIN_POINTS for points in lines.values())
    ]


def _ordered(points: dict[float, Point]) -> tuple[Point, ...]:
    return tuple(points[x] for x in sorted(points))


def check_matplotlib() -> None:
    """Before anything is measured. Raises BenchError."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BenchError(
            "plots need matplotlib; install it with: pip install 'hexlm[plots]'"
        ) from error


def draw(plots: list[Plot], folder: Path) -> list[Path]:
    """Writes the files and returns their paths. Raises BenchError without matplotlib, OSError."""
    check_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(plot, folder / plot.file_name) for plot in plots]


def _draw(plot: Plot, path: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    for target, points in plot.lines.items():
        xs = [point.x for point in points]
        axes.plot(xs, [point.median for point in points], marker="o", label=target)
        axes.fill_between(xs, [p.low for p in points], [p.high for p in points], alpha=0.2)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path
