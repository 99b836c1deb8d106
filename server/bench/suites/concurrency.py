"""Closed loop: 1, 2, 4 … streams at one time, and what they get together and each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from server.bench.distribution import percentile
from server.bench.run import Case, Measured, Plan, Round
from server.bench.suites.step_figures import queue_figures, step_figures
from server.bench.target import Target
from server.bench.timing import aggregate_rate
from server.bench.together import Together, ask_all
from server.bench.workloads import stream_of

NAME = "concurrency"
STREAMS, QUICK_STREAMS = (1, 2, 4, 8, 16, 32), (1, 4)
PROMPT = 64
NUM_NEW, QUICK_NUM_NEW = 128, 16


def cases(plan: Plan) -> tuple[Case, ...]:
    num_new = QUICK_NUM_NEW if plan.is_quick else NUM_NEW
    if PROMPT + num_new >= plan.max_length:
        return ()
    return tuple(
        Case(
            NAME,
            f"{count} stream{'s' if count > 1 else ''}",
            partial(measure, count, num_new),
            count,
            "streams",
        )
        for count in (QUICK_STREAMS if plan.is_quick else STREAMS)
    )


async def measure(count: int, num_new: int, target: Target, this: Round) -> Sequence[Measured]:
    generator = stream_of(this.seed, NAME, count)
    prompts = [this.tokens.prompt(generator, PROMPT) for _ in range(count)]
    async with target.observed() as seen:
        done = await ask_all(target, prompts, num_new)
    num_tokens = sum(timing.num_tokens for timing in done.timings)
    return (
        *aggregate_figures(done),
        *step_figures(seen.change, num_tokens),
        *queue_figures(seen.change),
    )


def aggregate_figures(done: Together) -> list[Measured]:
    rate = aggregate_rate(done.timings, done.wall_s)
    gaps = [gap for timing in done.timings for gap in timing.itl_s]
    ttft_s = percentile([timing.ttft_s for timing in done.timings], 0.95)
    figures = [
        Measured("rate, all", rate, "tokens/s", is_lower_better=False),
        Measured("TTFT p95", 1e3 * ttft_s, "ms"),
    ]
    if gaps:
        figures.append(Measured("ITL p95", 1e3 * percentile(gaps, 0.95), "ms"))
    return figures
