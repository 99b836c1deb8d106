"""Runs cases against targets: round by round, the targets in turn, warm-up apart.

A case that fails on a target is noted with its reason and left out there; a target that is lost is
asked nothing more. What was measured before is kept, whatever happens. Knows no HTTP, no report.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from server.bench.errors import NotAvailable, RequestFailed, TargetLost
from server.bench.results import FigureKey, Note, Results
from server.bench.target import Target
from server.bench.timing import Objectives
from server.bench.workloads import TokenRange

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure of one round."""

    name: str
    value: float
    unit: str
    is_lower_better: bool = True


@dataclass(frozen=True, slots=True)
class Round:
    """`seed` is that of this round: another one in the next, the same for every target."""

    seed: int
    tokens: TokenRange
    number: int


Measure = Callable[[Target, Round], Awaitable[Sequence[Measured]]]


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to do to a server. `measure` raises RequestFailed or NotAvailable.

    `is_constant`: its figures do not vary, so one round without a warm-up is enough.
    """

    suite: str
    name: str
    measure: Measure
    x: float | None = None
    x_label: str = ""
    is_constant: bool = False

    @property
    def full_name(self) -> str:
        return f"{self.suite}: {self.name}"

    def key(self, measured: Measured) -> FigureKey:
        return FigureKey(
            self.suite,
            self.name,
            measured.name,
            measured.unit,
            measured.is_lower_better,
            self.x,
            self.x_label,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What suites make their cases from. `max_length`: tokens that every target can hold;
    `arrivals_s`: how long requests keep coming at each of `rates`."""

    max_length: int
    is_quick: bool = False
    rates: tuple[float, ...] = (1.0, 2.0, 4.0)
    objectives: Objectives = field(default_factory=Objectives)
    arrivals_s: float = 20.0


class Progress(Protocol):
    def __call__(self, what: str, done: int, total: int) -> None: ...


@dataclass(slots=True)
class BenchRun:
    """`rounds` are counted after `warm_ups` that are not."""

    targets: Sequence[Target]
    results: Results
    tokens: TokenRange
    rounds: int
    seed: int = 0
    warm_ups: int = 1
    lost: set[str] = field(default_factory=set)

    async def run(self, cases: Sequence[Case], progress: Progress) -> None:
        """Returns when all cases are done or every target is lost."""
        total = sum(self._num_rounds(case) for case in cases)
        done = 0
        for case in cases:
            for number in range(self._num_rounds(case)):
                progress(case.full_name, done, total)
                await self._round(case, number)
                done += 1
        progress("done", total, total)

    def _num_rounds(self, case: Case) -> int:
        return 1 if case.is_constant else self.warm_ups + self.rounds

    async def _round(self, case: Case, number: int) -> None:
        """Every other round goes through the targets backwards, so that a drift meets all."""
        is_warm_up = not case.is_constant and number < self.warm_ups
        order = self.targets if number % 2 else tuple(reversed(self.targets))
        for target in order:
            if target.name not in self.lost and not self._was_noted(case, target):
                await self._measure(case, target, number, is_warm_up)

    def _was_noted(self, case: Case, target: Target) -> bool:
        noted = (target.name, case.suite, case.name)
        return any((n.target, n.suite, n.case) == noted for n in self.results.notes)

    async def _measure(self, case: Case, target: Target, number: int, is_warm_up: bool) -> None:
        seed = self.seed * 1_000_003 + number
        try:
            figures = await case.measure(target, Round(seed, self.tokens, number))
        except TargetLost as error:
            self.lost.add(target.name)
            self.results.note(Note(target.name, "", "", f"lost during {case.name}: {error}"))
            return
        except (RequestFailed, NotAvailable) as error:
            self.results.note(Note(target.name, case.suite, case.name, str(error)))
            return
        for figure in figures:
            self.results.add(case.key(figure), target.name, figure.value, is_warm_up=is_warm_up)
