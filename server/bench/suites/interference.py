"""Prefill against decode: what running streams feel when a long prompt comes in beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from server.bench.distribution import percentile
from server.bench.run import Case, Measured, Plan, Round
from server.bench.target import Target
from server.bench.together import all_of
from server.bench.workloads import stream_of

NAME = "interference"
STREAMS, PROMPT, NUM_NEW = 4, 64, 192
LONG, QUICK_LONG = 2048, 256
BEGIN_AFTER = 8
"""Chunks of all streams together; the long prompt comes then."""


def cases(plan: Plan) -> tuple[Case, ...]:
    length = min(QUICK_LONG if plan.is_quick else LONG, plan.max_length - 8)
    if plan.max_length <= PROMPT + NUM_NEW:
        return ()
    return (Case(NAME, f"{STREAMS} streams and {length} tokens", partial(measure, length)),)


async def measure(length: int, target: Target, this: Round) -> Sequence[Measured]:
    generator = stream_of(this.seed, NAME, length)
    prompts = [this.tokens.prompt(generator, PROMPT) for _ in range(STREAMS)]
    long_prompt = this.tokens.prompt(generator, length)
    quiet = await all_of(target, [target.ask(prompt, NUM_NEW) for prompt in prompts])
    alone = await target.ask(this.tokens.prompt(generator, length), 2)

    begun, num_heard = asyncio.Event(), 0

    def heard() -> None:
        nonlocal num_heard
        num_heard += 1
        if num_heard == BEGIN_AFTER:
            begun.set()

    fresh = [this.tokens.prompt(generator, PROMPT) for _ in range(STREAMS)]
    streams = all_of(target, [target.ask(prompt, NUM_NEW, heard=heard) for prompt in fresh])
    running = asyncio.ensure_future(streams)
    running.add_done_callback(lambda _: begun.set())
    try:
        await begun.wait()
        beside = await target.ask(long_prompt, 2)
        disturbed = await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    before, after = ([gap for t in each.timings for gap in t.itl_s] for each in (quiet, disturbed))
    figures = [
        Measured("TTFT of the prompt, alone", 1e3 * alone.ttft_s, "ms"),
        Measured("TTFT of the prompt, beside", 1e3 * beside.ttft_s, "ms"),
    ]
    if before and after:
        figures += [
            Measured("ITL p99, quiet", 1e3 * percentile(before, 0.99), "ms"),
            Measured("ITL p99, beside", 1e3 * percentile(after, 0.99), "ms"),
            Measured("longest gap, beside", 1e3 * max(after), "ms"),
        ]
    return figures
