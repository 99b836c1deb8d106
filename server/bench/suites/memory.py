"""Memory: of the weights and of keys and values by format and length, computed from the model; and
what all processes of the server have resident, measured."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from server.bench.errors import NotAvailable
from server.bench.run import Case, Measured, Plan, Round
from server.bench.target import Target
from server.bench.together import background
from server.bench.workloads import stream_of

NAME = "memory"
LENGTHS, QUICK_LENGTHS = (1024, 4096, 8192), (256,)
NUM_NEW = 8
POLL_S = 0.02


def cases(plan: Plan) -> tuple[Case, ...]:
    lengths = QUICK_LENGTHS if plan.is_quick else LENGTHS
    limit = plan.max_length - NUM_NEW
    fitting = list(dict.fromkeys(min(length, limit) for length in lengths if limit > 0))
    peaks = [
        Case(NAME, f"all processes, {n} tokens", partial(measure_peak, n), n, "context tokens")
        for n in fitting
    ]
    return (
        Case(NAME, "weights", measure_weights, is_constant=True),
        *(Case(NAME, f"KV of {n} tokens", partial(kv, n), is_constant=True) for n in fitting),
        *peaks,
    )


async def measure_weights(target: Target, this: Round) -> Sequence[Measured]:
    cost = known_cost(target)
    return (
        Measured("read by a step", cost["weight_bytes"] / 1e6, "MB"),
        Measured("on disk", cost["disk_bytes"] / 1e6, "MB"),
    )


async def kv(length: int, target: Target, this: Round) -> Sequence[Measured]:
    per_token = known_cost(target)["kv_bytes_per_token"]
    return [Measured(name, size * length / 1e6, "MB") for name, size in per_token.items()]


def known_cost(target: Target) -> dict[str, Any]:
    if not target.info.cost:
        raise NotAvailable("its model's files are not known; only a MODEL has them")
    return target.info.cost


async def measure_peak(length: int, target: Target, this: Round) -> Sequence[Measured]:
    """Resident bytes of all processes: pages that two of them share count twice."""
    peak = [target.resident_bytes()]
    prompt = this.tokens.prompt(stream_of(this.seed, NAME, length), length)

    async def watch() -> None:
        while True:
            peak[0] = max(peak[0], target.resident_bytes())
            await asyncio.sleep(POLL_S)

    async with background(watch):
        await target.ask(prompt, NUM_NEW)
    return (
        Measured("peak", max(peak[0], target.resident_bytes()) / 1e6, "MB"),
        Measured("after", target.resident_bytes() / 1e6, "MB"),
    )
