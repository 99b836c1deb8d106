"""Takes a stream of bytes apart into the data of its server-sent events.

Follows the HTML standard's event stream as far as OpenAI's format uses it: `data:` lines, comments
and other fields left out. Knows no JSON.
"""

from __future__ import annotations

from collections.abc import Iterator


class SseFrames:
    """Fed with pieces of any size; an event may be cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of every line that this piece completes."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
