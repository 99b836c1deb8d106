"""Open loop: requests that come at a given rate, evenly at random or in bursts, and how many of
the answers keep the objectives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from server.bench.run import Case, Measured, Plan, Round
from server.bench.suites.latency import percentile_figures
from server.bench.suites.step_figures import queue_figures
from server.bench.target import Target
from server.bench.timing import Objectives, aggregate_rate, goodput
from server.bench.together import ask_at
from server.bench.workloads import burst_arrivals, poisson_arrivals, stream_of

NAME = "arrivals"
PROMPT, NUM_NEW = 256, 64
QUICK_DURATION_S = 3.0
MIN_REQUESTS = 4
BURST_SIZE = 8
POISSON, BURST = "Poisson", "bursts"
_SHOWN = ("TTFT p50", "TTFT p95", "ITL p95")


def cases(plan: Plan) -> tuple[Case, ...]:
    if plan.max_length <= PROMPT + NUM_NEW:
        return ()
    duration_s = QUICK_DURATION_S if plan.is_quick else plan.arrivals_s
    rates = plan.rates[:1] if plan.is_quick else plan.rates
    return tuple(
        Case(
            NAME,
            f"{kind}, {rate:g}/s",
            partial(measure, kind, rate, duration_s, plan.objectives),
            rate,
            f"requests/s ({kind})",
        )
        for kind in (POISSON, BURST)
        for rate in rates
    )


async def measure(
    kind: str,
    rate: float,
    duration_s: float,
    objectives: Objectives,
    target: Target,
    this: Round,
) -> Sequence[Measured]:
    generator = stream_of(this.seed, NAME, kind, rate)
    count = max(MIN_REQUESTS, round(rate * duration_s))
    if kind == POISSON:
        times_s = poisson_arrivals(generator, rate, count)
    else:
        times_s = burst_arrivals(rate, count, BURST_SIZE)
    prompts = [this.tokens.prompt(generator, PROMPT) for _ in times_s]
    async with target.observed() as seen:
        done = await ask_at(target, prompts, times_s, NUM_NEW)
    good = sum(timing.meets(objectives) for timing in done.timings)
    rate_all = aggregate_rate(done.timings, done.wall_s)
    return (
        Measured("goodput", goodput(done.timings, objectives, done.wall_s), "/s", False),
        Measured("kept objectives", 100 * good / count, "%", is_lower_better=False),
        Measured("rate, all", rate_all, "tokens/s", is_lower_better=False),
        *(figure for figure in percentile_figures(done.timings) if figure.name in _SHOWN),
        *queue_figures(seen.change),
    )
