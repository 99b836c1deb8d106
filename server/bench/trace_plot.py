"""A trace as a picture: a decode step, one layer of it enlarged, and a step with a prompt.

What is drawn is pure data (`panels_of`); drawing needs matplotlib, the extra `plots`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from engine.span import Category
from server.bench.plots import check_matplotlib
from server.bench.report import number
from server.bench.trace_file import Event, Step, StepKind, TraceFile

COLOURS = {
    Category.OWN: ("#e69f00", "engine's own work"),
    Category.EXECUTE: ("#d9d9d9", "execution"),
    Category.MODEL: ("#0072b2", "matrices and norms"),
    Category.SEGMENT: ("#0072b2", "matrices and norms"),
    Category.NPU_CALL: ("#56b4e9", "NPU call"),
    Category.QNN: ("#009e73", "inside the NPU (QNN)"),
    Category.ATTENTION: ("#cc79a7", "attention"),
    Category.WAIT: ("#fbeccb", "waiting for other threads"),
}
_DARK = (Category.MODEL, Category.SEGMENT)
_LETTER_SHARE = 0.0066
"""Of the panel's width for each letter of a label, or it is left out."""

_LINE, _GAP = 0.96, 0.3
"""The height of a bar, of a line of 1; and what is between two tracks."""


_ROW_ORDER = ("step loop", "cpu thread", "lane", "attention")
_ROUNDING_S = 1e-9


@dataclass(frozen=True, slots=True)
class Bar:
    """`start_s` from the panel's beginning. `depth`: how many bars it lies in."""

    label: str
    category: Category
    row: int
    depth: int
    start_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    rows: tuple[str, ...]
    seconds: float
    bars: tuple[Bar, ...]


def panels_of(trace: TraceFile) -> list[Panel]:
    """Of the median decode step and the longest step with a prompt, where there are such."""
    panels = []
    if decodes := trace.of(StepKind.DECODE):
        middle_s = median(step.event.seconds for step in decodes)
        step = min(decodes, key=lambda s: abs(s.event.seconds - middle_s))
        panels += _panels_of_step("A step that decodes", step)
    if prompts := trace.of(StepKind.PROMPT):
        step = max(prompts, key=lambda s: s.number("tokens"))
        panels += _panels_of_step("A step with a prompt", step)
    return panels


def _panels_of_step(what: str, step: Step) -> list[Panel]:
    layer = _layer_panel(step)
    return [_step_panel(what, step), *([] if layer is None else [layer])]


def _step_panel(what: str, step: Step) -> Panel:
    names = ("tokens", "sequences", "context")
    numbers = ", ".join(f"{name} {step.number(name):,.0f}" for name in names)
    scale, unit = _unit(step.event.seconds)
    title = f"{what}: {scale * step.event.seconds:,.4g} {unit} ({numbers})"
    return _panel(title, step.parts, step.event.start_s, step.event.end_s)


def _layer_panel(step: Step) -> Panel | None:
    """The layer in the middle, from its first part to its last."""
    layers = sorted({part.args["layer"] for part in step.parts if "layer" in part.args})
    if not layers:
        return None
    layer = layers[len(layers) // 2]
    own = [part for part in step.parts if part.args.get("layer") == layer]
    start_s, end_s = min(p.start_s for p in own), max(p.end_s for p in own)
    inside = [p for p in step.parts if p.start_s >= start_s and p.end_s <= end_s]
    scale, unit = _unit(end_s - start_s)
    title = f"Its layer {layer}: {number(scale * (end_s - start_s))} {unit}"
    return _panel(title, inside, start_s, end_s)


def _unit(seconds: float) -> tuple[float, str]:
    """How many of which unit a second has."""
    if seconds >= 2:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 2e-3 else (1e6, "µs")


def _panel(title: str, all_parts: Sequence[Event], start_s: float, end_s: float) -> Panel:
    parts = [part for part in all_parts if part.seconds > _ROUNDING_S]
    rows = tuple(sorted({part.track for part in parts}, key=_row_order))
    open_ends: dict[str, list[float]] = {row: [] for row in rows}
    bars = []
    for part in parts:
        ends = open_ends[part.track]
        while ends and ends[-1] <= part.start_s + _ROUNDING_S:
            ends.pop()
        bars.append(
            Bar(
                part.name,
                part.category,
                rows.index(part.track),
                len(ends),
                part.start_s - start_s,
                part.seconds,
            )
        )
        ends.append(part.end_s)
    return Panel(title, rows, end_s - start_s, tuple(bars))


def _row_order(track: str) -> tuple[int, str]:
    """From the loop to the devices."""
    known = [i for i, start in enumerate(_ROW_ORDER) if track.startswith(start)]
    return (known or [len(_ROW_ORDER)])[0], track


def draw_trace(trace: TraceFile, path: Path) -> None:
    """Writes a PNG. Raises BenchError without matplotlib, OSError."""
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = panels_of(trace)
    heights = [_tops(panel)[-1] + 1.4 for panel in panels]
    figure = Figure(figsize=(15, 0.55 * sum(heights) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel)
    used = [c for c in COLOURS if any(bar.category is c for panel in panels for bar in panel.bars)]
    labels = {COLOURS[category][1]: COLOURS[category][0] for category in used}
    patches = [_patch(colour) for colour in labels.values()]
    figure.legend(patches, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    about = trace.about
    figure.suptitle(
        f"{about.get('model', '')} on {about.get('device', '')}, "
        f"{about.get('num_threads', '?')} threads",
        fontweight="bold",
    )
    figure.savefig(path, dpi=110)


def _patch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, edgecolor="#444444", linewidth=0.4)


def _draw_panel(axes: Any, panel: Panel) -> None:
    """A band for each track, with a line in it for each depth."""
    scale, unit = _unit(panel.seconds)
    tops = _tops(panel)
    for bar in panel.bars:
        colour = COLOURS[bar.category][0]
        start, width = scale * bar.start_s, scale * bar.seconds
        top = tops[bar.row] + bar.depth
        axes.broken_barh(
            [(start, width)], (top, _LINE), facecolor=colour, edgecolor="#444444",
            linewidth=0.4 if bar.seconds > 0.003 * panel.seconds else 0,
        )  # fmt: skip
        if bar.seconds > _LETTER_SHARE * len(bar.label) * panel.seconds:
            axes.text(
                start + width / 2, top + _LINE / 2, bar.label, fontsize=8,
                ha="center", va="center", clip_on=True,
                color="white" if bar.category in _DARK else "black",
            )  # fmt: skip
    middles = [(top + end - _GAP) / 2 for top, end in zip(tops, tops[1:], strict=False)]
    axes.set_yticks(middles, panel.rows)
    axes.set_ylim(tops[-1], -_GAP)
    axes.set_xlim(0, scale * panel.seconds)
    axes.set_xlabel(unit, loc="right", labelpad=1)
    axes.set_title(panel.title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _tops(panel: Panel) -> list[float]:
    """Where each track begins, from the top down, in lines; then the end of the last one."""
    tops = [0.0]
    for row in range(len(panel.rows)):
        depth = max(bar.depth for bar in panel.bars if bar.row == row)
        tops.append(tops[-1] + depth + 1 + _GAP)
    return tops
