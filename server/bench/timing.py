"""What a client saw of one streamed answer, and what many of them say together.

TTFT: time to the first text. ITL: the gaps between chunks. TPOT: time per token after the first,
by the server's own count of tokens, since one chunk may carry several. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from server.bench.distribution import percentile

PERCENTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Timing:
    """Times are seconds since the request was sent. `arrivals_s`: of the chunks with text;
    `total_s`: of the stream's end. The counts are from the answer's usage, or None where it has
    none; `num_chunks` stands in for tokens then.
    """

    arrivals_s: tuple[float, ...]
    total_s: float
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] if self.arrivals_s else self.total_s

    @property
    def num_tokens(self) -> int:
        return self.num_completion_tokens or len(self.arrivals_s)

    @property
    def itl_s(self) -> tuple[float, ...]:
        return tuple(after - before for before, after in pairwise(self.arrivals_s))

    @property
    def tpot_s(self) -> float | None:
        """None for answers of one token."""
        if self.num_tokens < 2 or len(self.arrivals_s) < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_tokens - 1)

    def meets(self, objectives: Objectives) -> bool:
        if self.ttft_s > objectives.ttft_s:
            return False
        return not self.itl_s or percentile(self.itl_s, 0.95) <= objectives.itl_p95_s


@dataclass(frozen=True, slots=True)
class Objectives:
    """What an answer must keep to be good: seconds to the first text, 95 % of its gaps below."""

    ttft_s: float = 2.0
    itl_p95_s: float = 0.15


def decode_rate(timing: Timing) -> float | None:
    """Tokens per second after the first."""
    return None if not timing.tpot_s else 1 / timing.tpot_s


def aggregate_rate(timings: Sequence[Timing], wall_s: float) -> float:
    """Tokens per second over all answers."""
    return sum(timing.num_tokens for timing in timings) / wall_s


def goodput(timings: Sequence[Timing], objectives: Objectives, wall_s: float) -> float:
    """Answers per second that kept the objectives (DistServe, Zhong et al. 2024)."""
    return sum(timing.meets(objectives) for timing in timings) / wall_s


def latency_percentiles(timings: Sequence[Timing]) -> dict[str, dict[float, float]]:
    """Name → share → seconds, for the latencies that the answers have."""
    values: dict[str, list[float]] = {
        "TTFT": [timing.ttft_s for timing in timings],
        "ITL": [gap for timing in timings for gap in timing.itl_s],
        "TPOT": [timing.tpot_s for timing in timings if timing.tpot_s is not None],
        "total": [timing.total_s for timing in timings],
    }
    return {
        name: {share: percentile(each, share) for share in PERCENTILES}
        for name, each in values.items()
        if each
    }
