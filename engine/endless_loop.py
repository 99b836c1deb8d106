"""Leads an output out of an endless loop inside the brackets and strings of its grammar.

A small model that is greedy repeats itself for ever, and where the grammar lets the output not end
there is no end token that could stop it: the budget would be spent inside one string. Such loops
reinforce themselves (Xu et al. 2022, "Learning to Break the Loop"), so after `MIN_REPEATED` tokens
that are each the same as one period before, nothing else is to be expected, and what can be closed
is closed: the string, or, if the loop goes over several values, the array and the object. Text that
is no loop may be of any length, and so may text that the model can end by itself.

What is done is a function of the tokens so far alone, so it is the same after a resume and with
drafts. Knows llguidance's matcher; not how a mask is used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.grammar import TokenMask

MAX_PERIOD = 64
"""Tokens. Loops of small models are a phrase long."""

MIN_REPEATED = 64
"""Tokens, and at least three periods beside the first one."""

_MIN_PERIODS = 3
_QUOTE = '"'
_BRACKETS = ("]", "}")
_LETTERS = ("a", "Q", "#", "}")
"""Where all of these may come, the output is inside a text."""

_WORD = re.compile(rb"[A-Za-z\x80-\xff]")
_ESCAPED = re.compile(rb"\\.", re.DOTALL)
_WORD_BITS = 32


class Repetition:
    """How the tokens of one sequence repeat; `period` is that of an endless loop, or 0."""

    def __init__(self) -> None:
        self._recent: list[int] = []  # newest first
        self._repeated: dict[int, int] = {}  # by period: tokens in a row as one period before
        self.period = 0

    def copy(self) -> Repetition:
        twin = Repetition()
        twin._recent, twin._repeated = self._recent.copy(), self._repeated.copy()
        twin.period = self.period
        return twin

    def push(self, token_id: int) -> None:
        recent, repeated = self._recent, self._repeated
        self._repeated = {
            period: repeated.get(period, 0) + 1
            for period, before in enumerate(recent, 1)
            if before == token_id
        }
        recent.insert(0, token_id)
        del recent[MAX_PERIOD:]
        self.period = next((p for p, n in self._repeated.items() if _is_endless(n, p)), 0)

    @property
    def next_token(self) -> int:
        """What would come next in the loop."""
        return self._recent[self.period - 1]

    def loop(self) -> list[int]:
        """The tokens of one period."""
        return self._recent[: self.period][::-1]


def _is_endless(num_repeated: int, period: int) -> bool:
    return num_repeated >= MIN_REPEATED and num_repeated >= _MIN_PERIODS * period


class WayOut:
    """What closes a string or a bracket, in one vocabulary. Safe in any thread."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        tokens = single_tokens(tokenizer, (_QUOTE, *_BRACKETS, *_LETTERS))
        self._quote = tokens.get(_QUOTE)
        self._brackets = [tokens[text] for text in _BRACKETS if text in tokens]
        self._letters = [tokens[text] for text in _LETTERS if text in tokens]

    def has_quote(self, loop: Sequence[int]) -> bool:
        """Whether these tokens go beyond the inside of one string."""
        text = _ESCAPED.sub(b"", self._tokenizer.decode_bytes(list(loop)))
        return _QUOTE.encode() in text

    def closes_string(self, token_id: int) -> bool:
        """Whether the token begins with a quote, as one that ends a string does."""
        return self._tokenizer.decode_bytes([token_id]).startswith(_QUOTE.encode())

    def has_words(self, loop: Sequence[int]) -> bool:
        return bool(_WORD.search(self._tokenizer.decode_bytes(list(loop))))

    def find(self, matcher: LLMatcher, mask: TokenMask, *, may_cut_text: bool) -> int | None:
        """The token that leads out of here, where `mask` tells what may come; None: none does.

        Without `may_cut_text` a string is left to end by itself.
        """
        if self._is_text(mask):
            return self._closing_quote(matcher, mask) if may_cut_text else None
        return next((token for token in self._brackets if _allows(mask, token)), None)

    def _closing_quote(self, matcher: LLMatcher, mask: TokenMask) -> int | None:
        """The quote, if it may come and ends the text: in free text it is a letter as any other."""
        if self._quote is None or not _allows(mask, self._quote):
            return None
        scout = matcher.deep_copy()
        behind = np.zeros_like(mask)
        if scout.consume_token(self._quote):
            scout.unsafe_compute_mask_ptr(behind.ctypes.data, behind.nbytes)
        closes = not scout.is_error() and not self._is_text(behind)
        return self._quote if closes else None

    def _is_text(self, mask: TokenMask) -> bool:
        return bool(self._letters) and all(_allows(mask, letter) for letter in self._letters)


class LoopGuard:
    """Follows the output of one sequence and narrows what may come next."""

    def __init__(self, way_out: WayOut) -> None:
        self._way_out = way_out
        self._repetition = Repetition()
        self._is_one_text = False
        self._num_leaving = 0
        """For how many tokens more the brackets around a loop of values are closed."""

    def copy(self) -> LoopGuard:
        twin = LoopGuard(self._way_out)
        twin._repetition = self._repetition.copy()
        twin._is_one_text, twin._num_leaving = self._is_one_text, self._num_leaving
        return twin

    def push(self, token_id: int) -> None:
        period, loop = self._repetition.period, self._repetition.loop()
        self._repetition.push(token_id)
        if self._repetition.period:
            self._is_one_text = not self._way_out.has_quote(self._repetition.loop())
        elif period and not (self._is_one_text and self._way_out.has_words(loop)):
            self._num_leaving = period
        else:
            self._num_leaving = max(0, self._num_leaving - 1)

    def narrow(self, matcher: LLMatcher, mask: TokenMask) -> None:
        """Leave of `mask`, in place, the one token that leads out, if this is a loop."""
        is_endless = self._repetition.period > 0
        if not is_endless and not self._num_leaving:
            return
        # The end of a string and the comma behind it may be one token: that is taken apart.
        may_cut_text = is_endless and (
            self._is_one_text or self._way_out.closes_string(self._repetition.next_token)
        )
        token = self._way_out.find(matcher, mask, may_cut_text=may_cut_text)
        if token is not None:
            mask[:] = 0
            mask[token // _WORD_BITS] = _bit(token)


def single_tokens(tokenizer: LLTokenizer, texts: Sequence[str]) -> dict[str, int]:
    """The token that is each of these texts, for those that are one token."""
    found: dict[str, int] = {}
    for text in texts:
        ids = tokenizer.tokenize_bytes(text.encode())
        if len(ids) == 1 and tokenizer.decode_bytes(ids) == text.encode():
            found[text] = ids[0]
    if len(found) < len(set(texts)):
        # Some tokenizers begin every text with a space. Tokens of bytes come before those of text.
        wanted = {text.encode(): text for text in texts if text not in found}
        for token_id in range(tokenizer.vocab_size):
            if (data := tokenizer.decode_bytes([token_id])) in wanted:
                found[wanted[data]] = token_id
    return found


def _allows(mask: TokenMask, token_id: int) -> bool:
    return bool(mask[token_id // _WORD_BITS] & _bit(token_id))


def _bit(token_id: int) -> np.int32:
    return np.uint32(1 << token_id % _WORD_BITS).astype(np.int32)
