"""Whether samples of a server under long load say that nothing grows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

SETTLED_S = 300.0
"""Until then pages of keys and values are touched for the first time, and caches fill."""

MAX_GROWTH = 0.02
MAX_SLOPE_BYTES = 1e6
"""Of resident memory per 1,000 requests."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at rest, `seconds` and `num_requests` after the load began: resident bytes of the
    process that serves and of those that compute, counts over all of them, and errors so far."""

    seconds: float
    num_requests: int
    server_bytes: int
    engine_bytes: int
    num_threads: int
    num_files: int
    num_free_blocks: int
    num_errors: int = 0

    @property
    def resident_bytes(self) -> int:
        return self.server_bytes + self.engine_bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """`growth`: of the highest resident memory after `from_s` over that at it, as a share.
    `slope_bytes`: the trend from there on per 1,000 requests."""

    from_s: float
    growth: float
    slope_bytes: float
    num_leaked_blocks: int
    num_errors: int
    num_new_files: int
    num_new_threads: int

    @property
    def is_flat(self) -> bool:
        return self.growth <= MAX_GROWTH

    @property
    def is_good(self) -> bool:
        return self.is_flat and not self.num_leaked_blocks and not self.num_errors

    def lines(self) -> Iterator[str]:
        flat = "flat" if self.is_flat else "GROWS"
        yield (
            f"resident memory after {self.from_s / 60:.1f} minutes: at most {self.growth:+.2%} "
            f"(bar: {MAX_GROWTH:.0%}): {flat}"
        )
        trend = "flat" if self.slope_bytes < MAX_SLOPE_BYTES else "rises"
        yield f"its trend: {self.slope_bytes / 1e6:+.2f} MB per 1,000 requests: {trend}"
        yield f"blocks that never came back: {self.num_leaked_blocks}"
        yield f"errors: {self.num_errors}"
        yield f"files and threads more than then: {self.num_new_files}, {self.num_new_threads}"
        yield "GOOD" if self.is_good else "BAD"


def judge(samples: Sequence[Sample]) -> Verdict:
    """Of a run that is shorter than `SETTLED_S`, the second half counts.

    Raises ValueError for fewer than two samples.
    """
    if len(samples) < 2:
        raise ValueError("one sample says nothing about growth")
    first, last = samples[0], samples[-1]
    from_s = min(SETTLED_S, last.seconds / 2)
    settled = [one for one in samples if one.seconds >= from_s]
    then = settled[0]
    highest = max(one.resident_bytes for one in settled)
    return Verdict(
        then.seconds,
        highest / then.resident_bytes - 1,
        slope_bytes(settled),
        first.num_free_blocks - last.num_free_blocks,
        last.num_errors,
        last.num_files - then.num_files,
        last.num_threads - then.num_threads,
    )


def slope_bytes(samples: Sequence[Sample]) -> float:
    """Least-squares growth of resident memory per 1,000 requests; 0 for too few samples."""
    if len({one.num_requests for one in samples}) < 2:
        return 0.0
    x = [one.num_requests / 1000 for one in samples]
    return float(np.polyfit(x, [one.resident_bytes for one in samples], 1)[0])
