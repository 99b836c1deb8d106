"""The one union of events that every dialect is written from, streaming or not.

Knows nothing of any wire format. Events of one choice come in order: at most one PromptScored,
then TextDeltas, then one Finished. Usage comes once, after all choices.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Logprobs of the prompt's own tokens; the first is None."""

    index: int
    logprobs: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of a choice. `logprobs` holds the entries of exactly the tokens that made it.

    `text` may be empty when tokens were finished that show nothing by themselves.
    """

    index: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """`reason` is a word of the wire: "stop" or "length"."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Of the whole request: every prompt once, every choice's tokens, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


Event = PromptScored | TextDelta | Finished | Usage
