"""The one text pipeline of a choice: token ids in, text with its logprobs out.

Bytes → characters (`detokenizer.py`) → text without stop strings (`stop_strings.py`). Every
endpoint and both modes use it, so they cannot differ. A token's logprob entry travels with the
text that the token made: it waits while that text is held back and is dropped with text behind a
stop string. Tokens that are not text (skipped control tokens, stop tokens) have an entry only with
`keeps_every_logprob`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.logprobs import TokenLogprobs
from server.detokenizer import Detokenizer
from server.stop_strings import StopMatcher
from server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextOptions:
    """`min_tokens`: stop strings are not looked for in the text of the first so many tokens.

    `keeps_every_logprob`: also tokens that are not text have their entry.
    `markers`: control tokens that are text even with `skip_special_tokens`, since parsers read
    them (`[TOOL_CALLS]`).
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    strips_leading_space: bool = False
    min_tokens: int = 0
    keeps_every_logprob: bool = False
    markers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A token whose text is the characters [start, end) of the whole text, end not yet shown."""

    start: int
    end: int
    logprobs: TokenLogprobs


class ChoiceText:
    """State of one choice's text. `num_tokens` counts up to the token that completed a stop."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._options = options
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            strips_leading_space=options.strips_leading_space,
            markers=options.markers,
        )
        self._matcher = StopMatcher(
            options.stop, include_in_output=options.include_stop_str_in_output
        )
        self._waiting: deque[_Waiting] = deque()
        self._num_decoded = 0
        self._num_shown = 0
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; no text follows it."""
        return self._matcher.matched is not None

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        stop_token_id: int | None,
    ) -> tuple[str, tuple[TokenLogprobs, ...]]:
        """Take in tokens; `stop_token_id` is the last of them if the engine stopped at it."""
        shown: list[str] = []
        hides_stop = stop_token_id is not None and not self._options.include_stop_str_in_output
        num_text_tokens = len(token_ids) - hides_stop
        for i, token_id in enumerate(token_ids):
            self.num_tokens += 1
            entry = logprobs[i] if logprobs else None
            if i < num_text_tokens:
                shown.append(self._push_token(token_id, entry))
            else:
                self._wait_without_text(entry)
            if self.stopped:
                break
        return self._show("".join(shown))

    def finish(self) -> tuple[str, tuple[TokenLogprobs, ...]]:
        """The text ended: everything that was held back comes out."""
        text = self._match(self._detokenizer.flush())
        if not self.stopped:
            text += self._matcher.flush()
        text, ready = self._show(text)
        rest = tuple(
            waiting.logprobs
            for waiting in self._waiting
            if not self.stopped or waiting.start < self._num_shown
        )
        self._waiting.clear()
        return text, ready + rest

    def _push_token(self, token_id: int, logprobs: TokenLogprobs | None) -> str:
        start = self._num_decoded
        text = self._detokenizer.push(token_id)
        self._num_decoded += len(text)
        if self._detokenizer.is_skipped(token_id):
            self._wait_without_text(logprobs)
        elif logprobs is not None:
            end = self._num_decoded + self._detokenizer.holds_bytes
            self._waiting.append(_Waiting(start, end, logprobs))
        return self._match(text)

    def _wait_without_text(self, logprobs: TokenLogprobs | None) -> None:
        if logprobs is not None and self._options.keeps_every_logprob:
            self._waiting.append(_Waiting(self._num_decoded, self._num_decoded, logprobs))

    def _match(self, text: str) -> str:
        if self.num_tokens <= self._options.min_tokens and not self.stopped:
            return text
        return self._matcher.push(text)

    def _show(self, text: str) -> tuple[str, tuple[TokenLogprobs, ...]]:
        self._num_shown += len(text)
        ready: list[TokenLogprobs] = []
        while self._waiting and self._waiting[0].end <= self._num_shown:
            ready.append(self._waiting.popleft().logprobs)
        return text, tuple(ready)
