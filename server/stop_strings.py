"""Finds stop strings in text that arrives in pieces, and never shows a part of one too early.

The stop string that is complete first wins; of two that end at the same character the longer
one. So the result is a function of the text and not of how it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed it text; it gives back what can no longer become part of a stop string."""

    def __init__(self, stop: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stop = tuple(stop)
        self._include_in_output = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is safe to show. After a match, that is the rest of all text there will be."""
        if self.matched is not None or not text:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        self._held = ""
        match = self._first_match(text)
        if match is not None:
            start, self.matched = match
            return text[: start + len(self.matched)] if self._include_in_output else text[:start]
        cut = self._hold_from(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held back: the text ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """(start, stop string) with the smallest end, then the smallest start."""
        found = ((text.find(stop), stop) for stop in self._stop)
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _hold_from(self, text: str) -> int:
        """Where the longest tail begins that some stop string starts with."""
        longest = max(len(stop) for stop in self._stop)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stop):
                return start
        return len(text)
