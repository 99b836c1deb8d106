"""How many panels a tile of few rows reads side by side: one, or several.

A step of one token is bound by memory, and what a CPU's prefetcher likes differs: on Intel's
Sapphire Rapids four streams are faster than one, on AMD's Zen 4 one is 1.5 times as fast as four.
So the first steps try both in turn. The bits are the same. Pure: told the times, it decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NUM_TRIES = 4
"""Steps of one token with each; the fastest one of each counts, since others are disturbed."""


@dataclass(slots=True)
class PanelStreams:
    """`choices`: the numbers to choose among. The last one is taken until all have been tried."""

    choices: tuple[int, ...]
    _seconds: dict[int, list[float]] = field(default_factory=dict)
    _chosen: int | None = None

    def choose(self, num_tokens: int) -> int:
        """For a step of so many tokens."""
        if self._chosen is not None:
            return self._chosen
        if num_tokens > 1:
            return self.choices[-1]
        return min(self.choices, key=lambda each: len(self._seconds.get(each, ())))

    def record(self, num_tokens: int, choice: int, seconds: float) -> None:
        if self._chosen is not None or num_tokens > 1:
            return
        self._seconds.setdefault(choice, []).append(seconds)
        if all(len(self._seconds.get(each, ())) >= NUM_TRIES for each in self.choices):
            self._chosen = min(self.choices, key=lambda each: min(self._seconds[each]))
