"""All suites by name, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from server.bench.run import Case, Plan
from server.bench.suites import (
    arrivals,
    cancels,
    concurrency,
    decode,
    interference,
    latency,
    long_context,
    memory,
    prefill,
    prefixes,
    priority,
)

SUITES: dict[str, Callable[[Plan], tuple[Case, ...]]] = {
    prefill.NAME: prefill.cases,
    decode.NAME: decode.cases,
    latency.NAME: latency.cases,
    memory.NAME: memory.cases,
    long_context.NAME: long_context.cases,
    concurrency.NAME: concurrency.cases,
    arrivals.NAME: arrivals.cases,
    prefixes.NAME: prefixes.cases,
    priority.NAME: priority.cases,
    interference.NAME: interference.cases,
    cancels.NAME: cancels.cases,
}


def cases_of(names: Sequence[str], plan: Plan) -> tuple[Case, ...]:
    """Of the suites with these names, in the table's order; of all of them for no names."""
    chosen = [make for name, make in SUITES.items() if not names or name in names]
    return tuple(case for make in chosen for case in make(plan))
