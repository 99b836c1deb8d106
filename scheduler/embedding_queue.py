"""Texts that wait for the encoder, and which of them make the next batch.

A batch is worth waiting for: it runs when `max_batch` texts are there, or when the oldest one has
waited for `window_s`. In a batch the lengths differ by at most `max_length_difference`, since
shorter texts are padded to the longest. Knows no clock (times are handed in) and no encoder.

Fairness. Requests take turns: the first in turn gives the first text, the others follow with one
text each per round, as far as their lengths fit, and the first in turn then goes to the end, behind
those that arrived while its batch ran. So a request waits for the running batch and at most one
more for each other request before it, however many texts those have.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler.messages import EmbedRequest


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """`max_batch_tokens` counts padding too; one text may have more by itself."""

    window_s: float = 0.005
    max_batch: int = 32
    max_length_difference: int = 32
    max_batch_tokens: int = 1024


@dataclass(frozen=True, slots=True)
class QueuedText:
    """Input number `index` of a request; `arrival_s` is when the engine got it."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    arrival_s: float


@dataclass(slots=True)
class _Waiting:
    """A request's texts that are still to be computed, the shortest first."""

    arrival_s: float
    texts: list[QueuedText] = field(default_factory=list)

    def longest(self, shortest: int, longest: int) -> int | None:
        """The position of the longest text whose length is from `shortest` to `longest`."""
        position = bisect_right(self.texts, longest, key=lambda t: len(t.token_ids)) - 1
        if position < 0 or len(self.texts[position].token_ids) < shortest:
            return None
        return position


class EmbeddingQueue:
    """Belongs to the loop's thread."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._waiting: dict[str, _Waiting] = {}  # in the order of turns
        self._had_its_turn = ""
        self.num_texts = 0

    def add(self, request: EmbedRequest, now_s: float) -> None:
        texts = [
            QueuedText(request.request_id, index, token_ids, now_s)
            for index, token_ids in enumerate(request.inputs)
        ]
        texts.sort(key=lambda text: len(text.token_ids))
        self._waiting[request.request_id] = _Waiting(now_s, texts)
        self.num_texts += len(texts)

    def abort(self, request_id: str) -> None:
        """Unknown ids are normal and ignored."""
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            self.num_texts -= len(waiting.texts)

    def wait_s(self, now_s: float) -> float | None:
        """How long to wait for more texts; 0: a batch is due. None: nothing is here."""
        if not self._waiting:
            return None
        if self.num_texts >= self._policy.max_batch:
            return 0.0
        oldest_s = min(waiting.arrival_s for waiting in self._waiting.values())
        return max(0.0, oldest_s + self._policy.window_s - now_s)

    def take_batch(self) -> list[QueuedText]:
        """At least one text, of the request whose turn it is. The queue must not be empty."""
        self._end_turn()
        self._had_its_turn, first = next(iter(self._waiting.items()))
        batch = _Batch(self._policy, first.texts.pop())
        for waiting in self._rounds():
            if batch.is_full:
                break
            batch.take_from(waiting)
        self.num_texts -= len(batch.texts)
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if waiting.texts}
        return batch.texts

    def _rounds(self) -> Iterator[_Waiting]:
        """All requests again and again, the one whose turn it is last, while any gives a text.

        Whether one gave a text is seen from its list: the caller takes from what is yielded.
        """
        first, *others = self._waiting.values()
        order = [*others, first]
        while order:
            still_giving = []
            for waiting in order:
                before = len(waiting.texts)
                yield waiting
                if 0 < len(waiting.texts) < before:
                    still_giving.append(waiting)
            order = still_giving

    def _end_turn(self) -> None:
        """Only now does the request of the last batch go to the end: others have arrived since."""
        if (waiting := self._waiting.pop(self._had_its_turn, None)) is not None:
            self._waiting[self._had_its_turn] = waiting


class _Batch:
    """A batch that is being put together: its texts, its shortest and its longest length."""

    def __init__(self, policy: BatchPolicy, first: QueuedText) -> None:
        self._policy = policy
        self.texts = [first]
        self._shortest = self._longest = len(first.token_ids)

    @property
    def is_full(self) -> bool:
        return len(self.texts) >= self._policy.max_batch

    def take_from(self, waiting: _Waiting) -> None:
        """Move the longest text that fits, if there is one, from `waiting` into the batch."""
        room = self._policy.max_batch_tokens // (len(self.texts) + 1)
        if room < self._longest:
            return
        difference = self._policy.max_length_difference
        upper = min(self._shortest + difference, room)
        position = waiting.longest(self._longest - difference, upper)
        if position is not None:
            self._add(waiting.texts.pop(position))

    def _add(self, text: QueuedText) -> None:
        self.texts.append(text)
        self._shortest = min(self._shortest, len(text.token_ids))
        self._longest = max(self._longest, len(text.token_ids))
