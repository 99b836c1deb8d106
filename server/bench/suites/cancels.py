"""Storms of cancels: clients that leave in the middle, and how soon everything is free again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from server.bench.run import Case, Measured, Plan, Round
from server.bench.target import Target
from server.bench.together import all_of, until_idle
from server.bench.workloads import stream_of

NAME = "cancels"
COUNT, QUICK_COUNT = 32, 8
PROMPT, NUM_NEW = 256, 256
LEAVE_AFTER = 2


def cases(plan: Plan) -> tuple[Case, ...]:
    count = QUICK_COUNT if plan.is_quick else COUNT
    if plan.max_length <= PROMPT + NUM_NEW:
        return ()
    return (Case(NAME, f"{count} leave after {LEAVE_AFTER} chunks", partial(measure, count)),)


async def measure(count: int, target: Target, this: Round) -> Sequence[Measured]:
    generator = stream_of(this.seed, NAME, count)
    prompts = [this.tokens.prompt(generator, PROMPT) for _ in range(count + 2)]
    calm = await target.ask(prompts[0], 2)
    free = await until_idle(target) if target.info.is_hexlm else 0.0
    await all_of(target, [target.ask(p, NUM_NEW, leave_after=LEAVE_AFTER) for p in prompts[2:]])
    after = await target.ask(prompts[1], 2)
    figures = [
        Measured("TTFT before", 1e3 * calm.ttft_s, "ms"),
        Measured("TTFT right after", 1e3 * after.ttft_s, "ms"),
    ]
    if target.info.is_hexlm:
        began_s = target.clock()
        lost = free - await until_idle(target)
        idle_s = target.clock() - began_s
        figures += [
            Measured("until nothing runs", 1e3 * idle_s, "ms"),
            Measured("blocks lost", lost, "blocks"),
        ]
    return figures
