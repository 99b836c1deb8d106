"""Events that are kept: every reader sees all of them in order, whenever it comes."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from server import response_log
from server.response_log import ResponseLog


async def read(log: ResponseLog, first: int) -> bytes:
    return b"".join([piece async for piece in log.follow(first)])


@given(st.lists(st.sampled_from(["append", "pause"]), max_size=30), st.integers(0, 12))
def test_a_reader_gets_what_was_and_what_comes_from_its_number_on(
    acts: list[str], first: int
) -> None:
    async def main() -> None:
        log = ResponseLog()
        early = asyncio.create_task(read(log, first))
        frames = [b"%d;" % i for i in range(acts.count("append"))]
        unsent = iter(frames)
        for act in acts:
            if act == "append":
                log.append([next(unsent)])
            else:
                await asyncio.sleep(0)
        log.end()
        wanted = b"".join(frames[first:])
        assert (await early, await read(log, first)) == (wanted, wanted)
        assert log.num_bytes == sum(map(len, frames))

    asyncio.run(main())


def test_a_reader_that_is_far_behind_gets_pieces_of_bounded_size() -> None:
    async def main() -> list[int]:
        log = ResponseLog()
        log.append([b"x" * 1_000] * 1_000)
        log.end()
        return [len(piece) async for piece in log.follow(0)]

    sizes = asyncio.run(main())
    assert sum(sizes) == 1_000_000
    assert max(sizes) <= response_log._PIECE_BYTES + 1_000


def test_a_reader_that_leaves_disturbs_nobody() -> None:
    async def main() -> None:
        log = ResponseLog()
        leaving, staying = (asyncio.create_task(read(log, 0)) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        log.append([b"a"])
        log.end()
        assert await staying == b"a"

    asyncio.run(main())
