"""Many requests at one time, and what a server holds meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from server.bench.target import Target
from server.bench.timing import Timing
from server.bench.workloads import Prompt

POLL_S = 0.05
IDLE_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Together:
    timings: tuple[Timing, ...]
    wall_s: float


async def all_of(target: Target, jobs: Sequence[Awaitable[Timing]]) -> Together:
    """Raises what the first failing request raises; the others are left then."""
    began_s = target.clock()
    async with contextlib.AsyncExitStack() as stack:
        tasks = [asyncio.ensure_future(job) for job in jobs]
        stack.push_async_callback(_cancel, tasks)
        timings = await asyncio.gather(*tasks)
    return Together(tuple(timings), target.clock() - began_s)


async def _cancel(tasks: Sequence[asyncio.Future[Timing]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def ask_all(
    target: Target, prompts: Sequence[Prompt], num_new: int, **fields: Any
) -> Together:
    return await all_of(target, [target.ask(prompt, num_new, **fields) for prompt in prompts])


async def ask_at(
    target: Target, prompts: Sequence[Prompt], times_s: Sequence[float], num_new: int
) -> Together:
    """An open loop: each request is sent at its time, whatever became of the ones before."""

    async def one(prompt: Prompt, time_s: float) -> Timing:
        await asyncio.sleep(time_s)
        return await target.ask(prompt, num_new)

    pairs = zip(prompts, times_s, strict=True)
    return await all_of(target, [one(prompt, time_s) for prompt, time_s in pairs])


@contextlib.asynccontextmanager
async def background(
    job: Callable[[], Awaitable[object]],
) -> AsyncIterator[asyncio.Future[object]]:
    """`job` runs while the block does, and is cancelled at its end; its failure is the block's."""
    task = asyncio.ensure_future(job())
    try:
        yield task
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def fewest_free_blocks(target: Target, into: list[float]) -> None:
    """Until cancelled: keeps the smallest count seen as `into[0]`."""
    while True:
        free = (await target.metrics()).free_blocks
        into[:] = [min([free, *into])]
        await asyncio.sleep(POLL_S)


async def until_idle(target: Target) -> float:
    """Free blocks once hexlm runs nothing and nothing waits, or after `IDLE_WITHIN_S`."""
    end_s = target.clock() + IDLE_WITHIN_S
    while True:
        metrics = await target.metrics()
        busy = metrics.value("num_requests_running") + metrics.value("num_requests_waiting")
        if not busy or target.clock() > end_s:
            return metrics.free_blocks
        await asyncio.sleep(POLL_S)
