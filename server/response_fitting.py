"""`truncation: "auto"` of the Responses API: leaves out the oldest turns until the rest fits.

A conversation is cut in front of a message of the user, so no output is left without its call and
no answer without its question. Messages of the system and the developer stay. The newest turn is
never cut: if it does not fit alone, the request is refused as any other that is too long.

Knows items and numbers; how a conversation becomes a prompt is handed in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from server.errors import ContextExceeded
from server.generation import GenerationSpec
from server.response_items import Item

Prepare = Callable[[list[Item]], Awaitable[GenerationSpec]]

_ANSWER_SHARE = 4
"""Of the context, one part in so many is left for an answer that names no length."""


def longest_prompt(context_limit: int, max_output_tokens: int | None) -> int:
    """Tokens that a conversation may have without losing its oldest turns: the answer has room
    for what was asked for, but never more than half of the context."""
    wanted = max_output_tokens or context_limit // _ANSWER_SHARE
    return context_limit - min(wanted, context_limit // 2)


async def prepare_fitting(
    items: Sequence[Item], prepare: Prepare, max_prompt_tokens: int
) -> GenerationSpec:
    """What `prepare` makes of as many of the newest turns as fit into `max_prompt_tokens`.

    The newest turn alone may be longer, as long as `prepare` takes it. `prepare` is called for the
    logarithm of the number of turns. Raises InvalidRequest as `prepare` does.
    """

    async def fits(start: int) -> bool:
        try:
            spec = await prepare(_shortened(items, start))
        except ContextExceeded:
            return False
        return spec.choices[0].prompt_tokens <= max_prompt_tokens

    starts = _starts(items)
    low, high = 0, len(starts) - 1  # the first start that fits, or else the last one
    if high and await fits(starts[0]):
        high = 0
    while low < high:
        middle = (low + high) // 2
        if await fits(starts[middle]):
            high = middle
        else:
            low = middle + 1
    return await prepare(_shortened(items, starts[low]))


def _starts(items: Sequence[Item]) -> list[int]:
    """Where a conversation may begin: as it is, and at each later message of the user."""
    later = range(1, len(items))
    return [0, *(i for i in later if items[i]["type"] == "message" and items[i]["role"] == "user")]


def _shortened(items: Sequence[Item], start: int) -> list[Item]:
    return [*filter(_is_instruction, items[:start]), *items[start:]]


def _is_instruction(item: Item) -> bool:
    return item["type"] == "message" and item["role"] in ("system", "developer")
