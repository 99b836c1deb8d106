"""Whether a high class is served as if it were alone while a low one takes all that there is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from server.bench.distribution import percentile
from server.bench.errors import NotAvailable, RequestFailed
from server.bench.run import Case, Measured, Plan, Round
from server.bench.target import Target
from server.bench.timing import Timing
from server.bench.together import POLL_S, all_of, background
from server.bench.workloads import stream_of

NAME = "priority"
HIGH, LOW = "high", "low"
NUM_LOW, QUICK_NUM_LOW = 40, 6
NUM_HIGH, QUICK_NUM_HIGH = 10, 2
PROMPT, HIGH_NEW, LOW_NEW = 128, 16, 96
BEGIN_WITHIN_S = 120.0


def cases(plan: Plan) -> tuple[Case, ...]:
    num_low = QUICK_NUM_LOW if plan.is_quick else NUM_LOW
    num_high = QUICK_NUM_HIGH if plan.is_quick else NUM_HIGH
    if plan.max_length <= PROMPT + LOW_NEW:
        return ()

    async def measure(target: Target, this: Round) -> Sequence[Measured]:
        return await measure_priority(num_low, num_high, target, this)

    return (Case(NAME, f"high among {num_low} low streams", measure),)


async def measure_priority(
    num_low: int, num_high: int, target: Target, this: Round
) -> Sequence[Measured]:
    if not target.info.is_hexlm:
        raise NotAvailable("it has no priority classes that this benchmark knows")
    idle = await ask_in_turn(target, this, "idle", num_high)
    low = LowLoad(target, this, num_low)
    async with background(low.run) as running:
        await low.wait_until_heard(num_low, running)
        before, began_s = low.num_chunks, target.clock()
        busy = await ask_in_turn(target, this, "busy", num_high)
        low_rate = (low.num_chunks - before) / (target.clock() - began_s)
    idle_s, busy_s = (percentile([t.ttft_s for t in each], 0.95) for each in (idle, busy))
    return (
        Measured("TTFT p95, high, idle", 1e3 * idle_s, "ms"),
        Measured("TTFT p95, high, under load", 1e3 * busy_s, "ms"),
        Measured("under load / idle", busy_s / idle_s, "x"),
        Measured("rate, low", low_rate, "chunks/s", is_lower_better=False),
    )


async def ask_in_turn(target: Target, this: Round, name: str, count: int) -> list[Timing]:
    generator = stream_of(this.seed, NAME, name)
    return [
        await target.ask(this.tokens.prompt(generator, PROMPT), HIGH_NEW, priority=HIGH)
        for _ in range(count)
    ]


class LowLoad:
    """`count` streams of the low class; each is followed by another one when it ends."""

    def __init__(self, target: Target, this: Round, count: int) -> None:
        self._target, self._this, self._count = target, this, count
        self.num_chunks = 0

    async def run(self) -> None:
        """Until it is cancelled. Raises what the first failing request raises."""
        await all_of(self._target, [self._stream(number) for number in range(self._count)])

    async def _stream(self, number: int) -> Timing:
        generator = stream_of(self._this.seed, NAME, LOW, number)
        while True:
            prompt = self._this.tokens.prompt(generator, PROMPT)
            await self._target.ask(prompt, LOW_NEW, heard=self._count_chunk, priority=LOW)

    def _count_chunk(self) -> None:
        self.num_chunks += 1

    async def wait_until_heard(self, num_chunks: int, running: asyncio.Future[object]) -> None:
        """Until the streams have brought so many chunks.

        Raises what ended `running`, the load, or RequestFailed if it does not begin.
        """
        end_s = self._target.clock() + BEGIN_WITHIN_S
        while self.num_chunks < num_chunks:
            if running.done():
                running.result()
            if self._target.clock() > end_s:
                raise RequestFailed(f"the low load has not begun after {BEGIN_WITHIN_S:.0f} s")
            await asyncio.sleep(POLL_S)
