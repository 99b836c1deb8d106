"""How many bits the 4-bit weights of a model take in its panels: 4, or 8 where that is faster.

The values are the same ones, and so is every result. With 4 bits a step reads half the bytes; with
8 there is nothing to unpack, which pays where a machine computes more slowly than it reads. What a
machine does is measured when a model is imported (`export/measured_width.py`).
Pure, but for the file in the bundle that keeps what was found.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

PANEL_WIDTH_FILE = "panel_width.json"
WIDTHS = NARROW, WIDE = 4, 8
PROMPT_TOKENS, ANSWER_TOKENS = 512, 128
PROMPT_ROWS = 64
"""Tokens of a prompt that are multiplied together; beyond, the speed does not change."""

MIN_GAIN = 1.05
"""By which the wider form must be faster, since it takes twice the memory."""

MAX_ROOM_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class WidthCosts:
    """`num_weights`: those of 4 bits. `operations_per_s`: of all threads, by bits in the panels,
    for one row and for `PROMPT_ROWS`; a weight is two operations."""

    num_threads: int
    num_weights: int
    row_operations_per_s: dict[int, float]
    prompt_operations_per_s: dict[int, float]

    def turn_s(self, bits: int) -> float:
        """The matrix products of a prompt and its answer."""
        answer_s = ANSWER_TOKENS / self.row_operations_per_s[bits]
        return (
            2 * self.num_weights * (answer_s + PROMPT_TOKENS / self.prompt_operations_per_s[bits])
        )


@dataclass(frozen=True, slots=True)
class WidthChoice:
    """`reason` is a sentence for people."""

    bits: int
    reason: str


def choose_width(costs: WidthCosts, room_bytes: int) -> WidthChoice:
    """`room_bytes`: the memory that is free."""
    narrow_s, wide_s = (costs.turn_s(bits) for bits in WIDTHS)
    found = (
        f"the matrix products of a prompt of {PROMPT_TOKENS} tokens and an answer of "
        f"{ANSWER_TOKENS} take {narrow_s:.3g} s with 4 bits and {wide_s:.3g} s with 8 "
        f"({costs.num_threads} threads)"
    )
    if narrow_s < MIN_GAIN * wide_s:
        return WidthChoice(NARROW, found)
    if costs.num_weights > MAX_ROOM_SHARE * room_bytes:
        room = f"{room_bytes / 1e9:,.1f} GB"
        return WidthChoice(NARROW, f"{found}, but 8 bits take more than half of {room} of memory")
    return WidthChoice(WIDE, found)


def encode_choice(choice: WidthChoice, costs: WidthCosts) -> str:
    """The text of `PANEL_WIDTH_FILE`."""
    document = {
        "bits": choice.bits,
        "reason": choice.reason,
        "num_threads": costs.num_threads,
        "num_weights": costs.num_weights,
        "row_operations_per_s": costs.row_operations_per_s,
        "prompt_operations_per_s": costs.prompt_operations_per_s,
    }
    return json.dumps(document, indent=1)


def read_choice(folder: Path) -> WidthChoice | None:
    """Of a bundle; None for one that does not say, or says it wrongly."""
    try:
        document = json.loads((folder / PANEL_WIDTH_FILE).read_text("utf-8"))
        return WidthChoice(int(document["bits"]), str(document["reason"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
