import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message

from server.sse import EventStream

SCOPE = {"type": "http", "method": "POST"}


async def pieces() -> AsyncIterator[bytes]:
    yield b"data: 1\n\n"
    yield b"data: 2\n\n"


async def run(fails_at: int | None, leaves_at_once: bool = False) -> tuple[list[Message], int]:
    """What was sent, and how often `close` was called; the client leaves or the socket fails."""
    sent: list[Message] = []
    closed: list[bool] = []

    async def close() -> None:
        closed.append(True)

    async def receive() -> Message:
        if not leaves_at_once:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if len(sent) == fails_at:
            raise OSError("gone")
        sent.append(message)

    stream = EventStream(pieces(), close, keep_alive_interval_s=10)
    try:
        await stream(SCOPE, receive, send)
    finally:
        assert len(closed) == 1
    return sent, len(closed)


def test_every_piece_is_one_message_and_the_stream_is_closed() -> None:
    sent, _ = asyncio.run(run(None))
    assert [m["body"] for m in sent[1:]] == [b"data: 1\n\n", b"data: 2\n\n", b""]


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_socket_that_fails_still_closes_the_stream(fails_at: int) -> None:
    with pytest.raises(OSError, match="gone"):
        asyncio.run(run(fails_at))


def test_a_client_that_is_gone_before_the_first_piece_closes_the_stream() -> None:
    assert asyncio.run(run(None, leaves_at_once=True))[1] == 1
