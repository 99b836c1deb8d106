"""Which segments a device with half precision may not run, because they overflowed there.

Pure. Some models have activations beyond 65,504 in a few layers. Such a segment is given to the
CPU for good after `MAX_OVERFLOWS`; a device on which many of them overflow is of no use.
"""

from __future__ import annotations

from collections import Counter

MAX_OVERFLOWS = 2
MAX_SHARE = 0.25

WHOLE_STEP = -1
"""Stands for the forms that run whole steps: which segment it was is not known then."""


class OverflowLedger:
    """`num_segments` counts segments 0 to L and the head (L + 1)."""

    def __init__(self, num_segments: int) -> None:
        self._num_segments = num_segments
        self._counts: Counter[int] = Counter()

    def record(self, segment: int) -> bool:
        """True if from now on the segment is the CPU's."""
        self._counts[segment] += 1
        return self._counts[segment] == MAX_OVERFLOWS

    @property
    def banned(self) -> frozenset[int]:
        return frozenset(s for s, count in self._counts.items() if count >= MAX_OVERFLOWS)

    @property
    def is_hopeless(self) -> bool:
        return len(self.banned - {WHOLE_STEP}) > MAX_SHARE * self._num_segments

    def in_words(self) -> str:
        """Such as: segments 3 and 7 on the CPU, …; empty while nothing is banned."""
        segments = sorted(self.banned - {WHOLE_STEP})
        words = []
        if segments:
            words.append(f"segments {', '.join(map(str, segments))} on the CPU")
        if WHOLE_STEP in self.banned:
            words.append("no whole steps on it")
        return f"{' and '.join(words)}, since fp16 overflowed" if words else ""
