"""The stream events of one response, kept so that a stream of them can be taken up again.

One writer appends events, any number of readers follow, each from a number of its own on and at a
speed of its own: nothing is queued for a reader. Belongs to the event loop's thread. Knows events
as bytes only; who may read them and for how long they are kept is decided elsewhere
(`response_store.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

_PIECE_BYTES = 256 * 1024
"""A reader that is far behind gets about so much at a time."""


class ResponseLog:
    """Event number i is the i-th that was appended."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._has_ended = False
        self._changed = asyncio.Event()
        self.num_bytes = 0

    def append(self, frames: Iterable[bytes]) -> None:
        for frame in frames:
            self._frames.append(frame)
            self.num_bytes += len(frame)
        self._wake()

    def end(self) -> None:
        """Nothing more will come: readers end behind the last event."""
        self._has_ended = True
        self._wake()

    async def follow(self, first: int = 0) -> AsyncIterator[bytes]:
        """The events from number `first` on, several in a piece, those to come included."""
        while True:
            if piece := self._piece(first):
                first += len(piece)
                yield b"".join(piece)
            elif self._has_ended:
                return
            else:
                await self._changed.wait()

    def _piece(self, first: int) -> list[bytes]:
        piece: list[bytes] = []
        size = 0
        for frame in self._frames[first:]:
            piece.append(frame)
            size += len(frame)
            if size >= _PIECE_BYTES:
                break
        return piece

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
