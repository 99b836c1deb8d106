import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.logprobs import TokenLogprobs
from scheduler.messages import FinishReason, StepOutput
from server.step_merge import MergedStep, StepMerger

STOP = FinishReason.STOP


async def stream(*outputs: StepOutput, error: Exception | None = None) -> AsyncIterator[StepOutput]:
    for output in outputs:
        yield output
    if error is not None:
        raise error


def merger(*streams: AsyncIterator[StepOutput]) -> StepMerger:
    return StepMerger(dict(enumerate(streams)), lambda index, output: None)


async def drained(merge: StepMerger) -> list[tuple[int, MergedStep]]:
    """What a reader finds that came back after everything had arrived."""
    merge.start()
    await asyncio.sleep(0.01)
    taken = await merge.take()
    await merge.aclose()
    return taken


def test_outputs_nobody_took_are_merged_into_one() -> None:
    entry = TokenLogprobs(1, -0.5)

    async def run() -> list[tuple[int, MergedStep]]:
        first = StepOutput(
            "a", (1,), logprobs=(entry,), prompt_logprobs=(None,), num_cached_tokens=4
        )
        last = StepOutput("a", (2, 9), STOP, 9, (entry, entry))
        return await drained(merger(stream(first, last)))

    [(index, step)] = asyncio.run(run())
    assert index == 0
    assert step == MergedStep(
        [1, 2, 9], [entry] * 3, (None,), 4, finish_reason=STOP, stop_token_id=9
    )


def test_each_sequence_is_merged_for_itself() -> None:
    async def run() -> list[tuple[int, MergedStep]]:
        streams = [
            stream(StepOutput(n, (i,)), StepOutput(n, (i,), STOP)) for i, n in enumerate("ab")
        ]
        return await drained(merger(*streams))

    assert [(i, step.token_ids) for i, step in asyncio.run(run())] == [(0, [0, 0]), (1, [1, 1])]


def test_an_error_comes_after_what_arrived_before_it() -> None:
    async def run() -> None:
        merge = merger(stream(StepOutput("a", (1,)), error=OSError("pipe")))
        merge.start()
        await asyncio.sleep(0.01)
        assert [step.token_ids for _, step in await merge.take()] == [[1]]
        with pytest.raises(OSError, match="pipe"):
            await merge.take()
        await merge.aclose()

    asyncio.run(run())


def test_a_stream_that_just_ends_is_an_error_and_no_hang() -> None:
    async def run() -> None:
        merge = merger(stream())
        merge.start()
        with pytest.raises(EOFError):
            await asyncio.wait_for(merge.take(), 1)
        await merge.aclose()

    asyncio.run(run())
