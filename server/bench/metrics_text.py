"""Reads the numbers of a /metrics answer (Prometheus' text format) that the benchmark uses.

Series of one name are added up over their labels, since one model is measured. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

PHASES = ("schedule", "execute", "sample", "commit")
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_PHASE = re.compile(r'phase="(\w+)"')


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """`values` by the series' name; `phase_s` seconds so far by phase of the step."""

    values: Mapping[str, float] = field(default_factory=dict)
    phase_s: Mapping[str, float] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """Of hexlm's series `name`, 0 where it has not been counted yet."""
        return self.values.get(f"hexlm:{name}", 0.0)

    @property
    def num_steps(self) -> float:
        return self.value("engine_steps_total")

    @property
    def free_blocks(self) -> float:
        return self.value("kv_blocks_free")


@dataclass(frozen=True, slots=True)
class MetricsChange:
    """What happened between two snapshots."""

    before: MetricsSnapshot
    after: MetricsSnapshot

    def of(self, name: str) -> float:
        return self.after.value(name) - self.before.value(name)

    @property
    def num_steps(self) -> float:
        return self.after.num_steps - self.before.num_steps

    def step_s(self, *phases: str) -> float | None:
        """Mean seconds per step in these phases; None if there was no step."""
        if self.num_steps <= 0:
            return None
        after, before = self.after.phase_s, self.before.phase_s
        spent = sum(after.get(phase, 0.0) - before.get(phase, 0.0) for phase in phases)
        return spent / self.num_steps

    @property
    def queue_s(self) -> float | None:
        """Mean seconds that a sequence waited for its first step."""
        count = self.of("request_queue_time_seconds_count")
        return self.of("request_queue_time_seconds_sum") / count if count else None


def parse_metrics(text: str) -> MetricsSnapshot:
    values: dict[str, float] = {}
    phase_s: dict[str, float] = {}
    for name, labels, number in _LINE.findall(text):
        value = float(number)
        values[name] = values.get(name, 0.0) + value
        if name == "hexlm:step_time_seconds_sum" and (found := _PHASE.search(labels)):
            phase_s[found[1]] = phase_s.get(found[1], 0.0) + value
    return MetricsSnapshot(values, phase_s)
