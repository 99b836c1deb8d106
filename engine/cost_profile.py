"""What was measured of a machine and a model: the cost of each piece of work on each lane.

Pure values with their arithmetic and their JSON. Who measures is `lane_timing.py`, who keeps the
file `profile_store.py`, who decides by it `placement.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.batch import Batch

FIRST, MIDDLE, LAST, HEAD = KINDS = ("first", "middle", "last", "head")
"""Kinds of segments: 0; each of 1 to L - 1; L, over the rows that sample; the head, over these."""

Points = tuple[tuple[int, float], ...]
"""(number of rows or tokens, seconds), ascending."""

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class LaneCosts:
    """Seconds of one call of each kind of segment, by its number of rows.

    `is_bucketed`: between two measured numbers a call costs as much as at the larger one, as a
    device with static shapes does; else the cost is taken to be linear between them.
    """

    call_overhead_s: float
    segments: Mapping[str, Points]
    is_bucketed: bool

    def seconds(self, kind: str, num_rows: int) -> float:
        points = self.segments[kind]
        return _stairs(points, num_rows) if self.is_bucketed else _line(points, num_rows)


@dataclass(frozen=True, slots=True)
class WholeCosts:
    """Seconds of a whole step: ((tokens, context length, seconds), …), ascending."""

    steps: tuple[tuple[int, int, float], ...]

    def seconds(self, num_tokens: int, context_len: int) -> float:
        """Of the smallest measured step that is no smaller; beyond all, in proportion to tokens."""
        for tokens, context, seconds in self.steps:
            if tokens >= num_tokens and context >= context_len:
                return seconds
        tokens, _, seconds = self.steps[-1]
        return seconds * max(1.0, num_tokens / tokens)


@dataclass(frozen=True, slots=True)
class CostProfile:
    """`num_layers` L, `hidden_size`: of the model. All costs in seconds.

    `cpu_step`: a step of one sequence on the CPU's own form, by its number of tokens, with the
    logits of one row; `cpu_rows`: what that many rows of logits cost there beyond one. Both have
    hardly any attention in them. `lanes` has the NPU's lane; the CPU's only if somebody measured
    it, and only then are steps divided between them. `decode_attention`: one layer's attention of
    one token, by context length; `chunk_attention`: the same of one token of a prefill chunk.
    `copy_bytes_per_s`: how fast rows go from one lane's buffers to another's. `handover_s`: from
    one thread's release of a lock to the other's first instruction. `whole`: forms of the NPU that
    run whole steps.
    """

    num_layers: int
    hidden_size: int
    cpu_step: Points
    cpu_rows: Points
    lanes: Mapping[str, LaneCosts]
    decode_attention: Points
    chunk_attention: Points
    copy_bytes_per_s: float
    handover_s: float
    whole: Mapping[str, WholeCosts]

    def copy_s(self, num_rows: int) -> float:
        """Of the residual of that many tokens."""
        return num_rows * self.hidden_size * 4 / self.copy_bytes_per_s

    def cpu_step_s(self, num_tokens: int, num_rows: int) -> float:
        """A whole step on the CPU's own form, but for its attention."""
        seconds = _line(self.cpu_step, num_tokens)
        return seconds + _line(self.cpu_rows, num_rows) if num_rows > 1 else seconds

    def attention_s(self, batch: Batch) -> float:
        """One layer's attention of a whole batch."""
        return float(self.sequence_attention_s(batch).sum())

    def sequence_attention_s(self, batch: Batch) -> np.ndarray:
        """One layer's attention of each sequence, [S] float64."""
        num_tokens = np.diff(batch.query_starts)
        decode = _at(self.decode_attention, batch.context_lens)
        chunk = _at(self.chunk_attention, batch.context_lens)
        seconds: np.ndarray = np.where(num_tokens == 1, decode, num_tokens * chunk)
        return seconds

    def as_json(self) -> dict[str, Any]:
        lanes = {
            name: {
                "call_overhead_s": costs.call_overhead_s,
                "is_bucketed": costs.is_bucketed,
                "segments": {kind: list(map(list, p)) for kind, p in costs.segments.items()},
            }
            for name, costs in self.lanes.items()
        }
        return {
            "format": _FORMAT,
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "cpu_step": [list(point) for point in self.cpu_step],
            "cpu_rows": [list(point) for point in self.cpu_rows],
            "lanes": lanes,
            "decode_attention": [list(point) for point in self.decode_attention],
            "chunk_attention": [list(point) for point in self.chunk_attention],
            "copy_bytes_per_s": self.copy_bytes_per_s,
            "handover_s": self.handover_s,
            "whole": {name: [list(s) for s in costs.steps] for name, costs in self.whole.items()},
        }


def profile_from_json(value: Any) -> CostProfile:
    """Raises ValueError when it is not what `as_json` gives, or holds what cannot be a cost."""
    try:
        if value["format"] != _FORMAT:
            raise ValueError(f"format {value['format']} instead of {_FORMAT}")
        profile = CostProfile(
            num_layers=int(value["num_layers"]),
            hidden_size=int(value["hidden_size"]),
            cpu_step=_points(value["cpu_step"]),
            cpu_rows=_points(value["cpu_rows"]),
            lanes={str(name): _lane_costs(costs) for name, costs in value["lanes"].items()},
            decode_attention=_points(value["decode_attention"]),
            chunk_attention=_points(value["chunk_attention"]),
            copy_bytes_per_s=_positive(value["copy_bytes_per_s"]),
            handover_s=_positive(value["handover_s"]),
            whole={str(name): _whole_costs(steps) for name, steps in value["whole"].items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a cost profile ({type(error).__name__}: {error})") from error
    return profile


def _lane_costs(value: Any) -> LaneCosts:
    segments = {kind: _points(value["segments"][kind]) for kind in KINDS}
    return LaneCosts(_positive(value["call_overhead_s"]), segments, bool(value["is_bucketed"]))


def _whole_costs(steps: Any) -> WholeCosts:
    if not steps:
        raise ValueError("a form of whole steps has no costs")
    return WholeCosts(tuple((int(t), int(c), _positive(seconds)) for t, c, seconds in steps))


def _points(value: Any) -> Points:
    points = tuple((int(number), _positive(seconds)) for number, seconds in value)
    numbers = [number for number, _ in points]
    if not points or numbers != sorted(set(numbers)) or numbers[0] < 1:
        raise ValueError(f"costs must be given for ascending numbers, not for {numbers}")
    return points


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError(f"a cost must be positive, not {value}")
    return number


def _at(points: Points, numbers: NDArray[np.int32]) -> np.ndarray:
    """Linear between the points, at each of `numbers`; beyond the last one in proportion."""
    last, seconds = points[-1]
    inside = np.interp(numbers, [n for n, _ in points], [s for _, s in points])
    return np.where(numbers > last, numbers * (seconds / last), inside)


def _line(points: Points, number: int) -> float:
    """Linear between the points; beyond the last one in proportion to the number."""
    at = bisect_left(points, (number, 0.0))
    if at == 0:
        return points[0][1]
    (lower, before) = points[at - 1]
    if at == len(points):
        return before * number / lower
    (upper, after) = points[at]
    return before + (after - before) * (number - lower) / (upper - lower)


def _stairs(points: Points, number: int) -> float:
    last, seconds = points[-1]
    whole, rest = divmod(number, last)
    cost = whole * seconds
    if rest:
        cost += points[bisect_left(points, (rest, 0.0))][1]
    return cost
