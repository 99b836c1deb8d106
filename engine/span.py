"""What took how long in a step: spans, as plain values that cross the process boundary.

Times are nanoseconds since 1970, on one clock for engine and server. What the threads of a team
did travels as the raw stamps that the compiled step leaves, and becomes spans where it is read:
a step has a thousand of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Argument = int | float | str


class Category(StrEnum):
    """What a span's time was spent on. `OWN`: the engine's work around the model."""

    STEP = "step"
    QUEUE = "queue"
    OWN = "own work"
    EXECUTE = "execute"
    MODEL = "model"
    ATTENTION = "attention"
    WAIT = "wait"
    SEGMENT = "segment"
    NPU_CALL = "npu call"
    QNN = "qnn"


@dataclass(frozen=True, slots=True)
class Span:
    """`track`: the thread, lane or queue that it is a row of; spans of one track nest."""

    name: str
    category: Category
    track: str
    start_ns: int
    end_ns: int
    args: Mapping[str, Argument] = field(default_factory=dict)


def lane_track(lane: str) -> str:
    """The row of a lane's segments and calls."""
    return f"lane {lane}"


@dataclass(frozen=True, slots=True)
class TeamTimes:
    """One step of a team of N threads. `phases`: (name, layer or None) of each of the P phases.

    `ticks` [N, 2 P + 1] int64: beginning and end of each phase by the time stamp counter, then the
    end of the waiting after the last one. What the step did not reach is older than its beginning.
    It all lies between `start_ns` and `end_ns`.
    """

    phases: tuple[tuple[str, int | None], ...]
    ticks: NDArray[np.int64]
    start_ns: int
    end_ns: int

    @property
    def num_phases(self) -> int:
        """How many of them this step had: one without logits ends early."""
        ends = self.ticks[0, 1::2]
        stale = np.flatnonzero(ends < self.ticks[0, 0])
        return int(stale[0]) if len(stale) else len(ends)

    @property
    def first_tick(self) -> int:
        return int(self.ticks[:, 0].min())

    @property
    def last_tick(self) -> int:
        return int(self.ticks[:, 2 * self.num_phases].max())

    def spans(self, ns_per_tick: float) -> Iterator[Span]:
        """What each thread did and where it waited for the others; ends with the step.

        `ns_per_tick`: see there.
        """
        num_phases = self.num_phases
        ticks = self.ticks[:, : 2 * num_phases + 1]
        # In integers: a float has no room for nanoseconds since 1970.
        before_end_ns = np.rint((self.last_tick - ticks) * ns_per_tick).astype(np.int64)
        times_ns = (self.end_ns - before_end_ns).tolist()
        for number, stamps in enumerate(times_ns):
            track = f"cpu thread {number}"
            for index, (name, layer) in enumerate(self.phases[:num_phases]):
                start_ns, end_ns, met_ns = stamps[2 * index : 2 * index + 3]
                args: dict[str, Argument] = {} if layer is None else {"layer": layer}
                yield Span(name, _phase_category(name), track, start_ns, end_ns, args)
                if met_ns > end_ns:
                    yield Span("wait", Category.WAIT, track, end_ns, met_ns, args)


def ns_per_tick(teams: Sequence[TeamTimes]) -> float:
    """The length of a tick: as long as it can be if all stamps fit into the times of their steps.

    What passes around the stamps of a step makes its bound loose, so it is taken over the steps
    from each one to the last: the longer they are together, the tighter the bound.
    """
    bounds = (bound for team in teams for bound in (_bound(team, team), _bound(team, teams[-1])))
    return min(bounds, default=1.0)


def _bound(first: TeamTimes, last: TeamTimes) -> float:
    return (last.end_ns - first.start_ns) / max(1, last.last_tick - first.first_tick)


def _phase_category(name: str) -> Category:
    is_attention = name.startswith(("attention", "rope"))
    return Category.ATTENTION if is_attention else Category.MODEL


@dataclass(frozen=True, slots=True)
class TracedStep:
    """All that was recorded of one step: the spans that were made, and those that are to be."""

    spans: tuple[Span, ...]
    teams: tuple[TeamTimes, ...] = ()

    def all_spans(self, tick_ns: float) -> list[Span]:
        """In the order of their beginnings, the outer one first. `tick_ns`: see `ns_per_tick`."""
        inner = (span for team in self.teams for span in team.spans(tick_ns))
        return sorted((*self.spans, *inner), key=lambda span: (span.start_ns, -span.end_ns))
