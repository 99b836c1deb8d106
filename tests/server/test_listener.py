"""The listening socket, as asyncio serves it."""

from __future__ import annotations

import asyncio
import socket

from server.listener import bind


def test_small_pieces_of_an_answer_do_not_wait_for_each_other() -> None:
    async def accepted_option() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sock = writer.get_extra_info("socket")
            found.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with bind("127.0.0.1", 0) as listening:
            async with await asyncio.start_server(accept, sock=listening):
                _, writer = await asyncio.open_connection(*listening.getsockname())
                option = await found
                writer.close()
                await writer.wait_closed()
                return option

    assert asyncio.run(accepted_option()) != 0
