"""End to end, one request after another as one user sends them: TTFT, ITL, TPOT, total."""

from __future__ import annotations

from collections.abc import Sequence

from server.bench.run import Case, Measured, Plan, Round
from server.bench.target import Target
from server.bench.timing import Timing, latency_percentiles
from server.bench.workloads import stream_of

NAME = "latency"
SHAPES = ((32, 32), (128, 64), (512, 64), (64, 128))
"""(prompt, answer) tokens of the requests, taken in turn."""

NUM_REQUESTS, QUICK_NUM_REQUESTS = 12, 4


def cases(plan: Plan) -> tuple[Case, ...]:
    count = QUICK_NUM_REQUESTS if plan.is_quick else NUM_REQUESTS
    shapes = [shape for shape in SHAPES if sum(shape) < plan.max_length]

    async def measure(target: Target, this: Round) -> Sequence[Measured]:
        generator = stream_of(this.seed, NAME)
        timings = []
        for number in range(count):
            prompt_tokens, num_new = shapes[number % len(shapes)]
            prompt = this.tokens.prompt(generator, prompt_tokens)
            timings.append(await target.ask(prompt, num_new))
        return percentile_figures(timings)

    return (Case(NAME, f"{count} requests in turn", measure),) if shapes else ()


def percentile_figures(timings: Sequence[Timing]) -> list[Measured]:
    return [
        Measured(f"{name} p{round(100 * share)}", 1e3 * value, "ms")
        for name, shares in latency_percentiles(timings).items()
        for share, value in shares.items()
    ]
