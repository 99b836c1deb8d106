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
class ReasoningDelta:
    """New text of a choice's thought, which comes before its content."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Call number `call` of a choice begins: of the function `name`. Calls come one by one."""

    index: int
    call: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    call: int
    text: str


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The ids of a choice's prompt. Comes first, and only if ids were asked for."""

    index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Ids that the engine generated, end tokens included; only if they were asked for. They come
    as they are made: the text that they make may follow later, or not at all."""

    index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """`reason` is a word of the wire: "stop", "length" or "tool_calls"; "length" wins."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Of the whole request: every prompt once, every choice's tokens, in tokens.

    `reasoning_tokens` are those of `completion_tokens` that were thought. Of `draft_tokens`, which
    were guessed and checked, `accepted_tokens` are in the answers; the others are not charged."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


Event = (
    PromptTokens
    | TokenIds
    | PromptScored
    | ReasoningDelta
    | TextDelta
    | ToolCallStart
    | ToolCallArguments
    | Finished
    | Usage
)
