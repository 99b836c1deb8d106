"""To the model's limit: the time to read a prompt that fills the context, and to go on from it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from server.bench.run import Case, Measured, Plan, Round
from server.bench.suites.decode import rate_of
from server.bench.target import Target
from server.bench.workloads import stream_of

NAME = "long-context"
SHARES = (0.25, 0.5, 1.0)
QUICK_SHARES = (1.0,)
QUICK_LIMIT = 1024
NUM_NEW = 32


def cases(plan: Plan) -> tuple[Case, ...]:
    limit = min(plan.max_length, QUICK_LIMIT) if plan.is_quick else plan.max_length
    lengths = [int(limit * share) - NUM_NEW for share in _shares(plan)]
    return tuple(
        Case(NAME, f"{length} tokens", partial(measure, length), length, "prompt tokens")
        for length in lengths
        if length > 0
    )


def _shares(plan: Plan) -> tuple[float, ...]:
    return QUICK_SHARES if plan.is_quick else SHARES


async def measure(length: int, target: Target, this: Round) -> Sequence[Measured]:
    prompt = this.tokens.prompt(stream_of(this.seed, NAME, length), length)
    timing = await target.ask(prompt, NUM_NEW)
    return (
        Measured("TTFT", 1e3 * timing.ttft_s, "ms"),
        Measured("decode rate", rate_of(timing), "tokens/s", is_lower_better=False),
    )
