"""Grammars enforced by llguidance: with `endless_loop.py` the only import of it in the engine.

A grammar text is llguidance's own (JSON Schema, Lark or regex inside). It is compiled once, kept
in a bounded cache, and every sequence gets a copy of the compiled matcher. Compiling includes the
first mask, so that a grammar that can match nothing is refused here and not while generating.

The library reports failure by a state, in which its masks allow the end tokens; so the state is
asked after everything that could fail.

Where only one text can follow, the library allows only the tokens that its tokenizer makes of that
text. As this tokenizer reads control tokens in it, a grammar that spells one is compiled without
that: then every way to write a text is allowed. An output that goes in circles is led out of them
(`endless_loop.py`). Knows no sequence and no sampling.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.endless_loop import LoopGuard, WayOut
from engine.grammar import UNCONSTRAINED, Grammar, GrammarError, TokenMask

_CACHE_SIZE = 64
_MAX_LEXER_STATES = 50_000
"""Bounds a matcher's memory: a state takes 1 to 2 kB."""

_MAX_REASON_CHARS = 500
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """`control_texts`: how the tokens are spelled that its tokenizer takes out of a text first."""

    tokenizer: LLTokenizer
    control_texts: tuple[str, ...]
    way_out: WayOut


class GrammarFactory:
    """The grammars of one vocabulary. Safe in any thread.

    `tokenizer_json`: gives the text of the model's `tokenizer.json`; called with the first grammar,
    as reading a vocabulary takes a few tenths of a second. `vocab_size` is the model's.
    """

    def __init__(
        self, tokenizer_json: Callable[[], str], end_token_ids: Sequence[int], vocab_size: int
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._end_token_ids = list(end_token_ids)
        self._vocab_size = vocab_size
        self._vocabulary: _Vocabulary | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._vocabulary_lock = threading.Lock()
        self._cache_lock = threading.Lock()

    def create(self, text: str) -> Grammar:
        """A grammar before its first token. Raises GrammarError with what is wrong with `text`."""
        if not text:
            return UNCONSTRAINED
        vocabulary = self._open_vocabulary()
        with self._cache_lock:
            template = self._compiled.get(text)
        if template is None:
            template = _compile(vocabulary, text)
        with self._cache_lock:
            self._compiled[text] = template
            self._compiled.move_to_end(text)
            while len(self._compiled) > _CACHE_SIZE:
                self._compiled.popitem(last=False)
            guard = LoopGuard(vocabulary.way_out)
            return MatcherGrammar(template.deep_copy(), vocabulary.tokenizer.vocab_size, guard)

    def _open_vocabulary(self) -> _Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
            return self._vocabulary

    def _read_vocabulary(self) -> _Vocabulary:
        text = self._tokenizer_json()
        ends = self._end_token_ids or None
        try:
            added = json.loads(text).get("added_tokens") or []
            tokenizer = LLTokenizer(text, eos_token=ends)
            if tokenizer.vocab_size < self._vocab_size:  # the model's matrix has padding
                tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=ends)
        except ValueError as error:
            raise GrammarError(f"this model's tokenizer cannot be constrained: {error}") from error
        control_texts = tuple(token["content"] for token in added)
        return _Vocabulary(tokenizer, control_texts, WayOut(tokenizer))


class MatcherGrammar:
    """A `Grammar` over a matcher of its own."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, guard: LoopGuard) -> None:
        self._matcher = matcher
        self._guard = guard
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._buffer = np.zeros((1, self._num_words), np.int32)

    @property
    def is_terminated(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def masks(self, draft_token_ids: Sequence[int]) -> Sequence[TokenMask | None]:
        num_rows = 1 + len(draft_token_ids)
        if num_rows > len(self._buffer):
            self._buffer = np.zeros((num_rows, self._num_words), np.int32)
        _fill_mask(self._matcher, self._buffer[0])
        self._guard.narrow(self._matcher, self._buffer[0])
        masks: list[TokenMask | None] = [self._buffer[0]]
        if draft_token_ids:
            masks += self._masks_behind(draft_token_ids)
        return masks

    def accept(self, token_ids: Sequence[int]) -> int:
        for count, token_id in enumerate(token_ids, start=1):
            if not self._matcher.consume_token(token_id):
                raise GrammarError(_reason(self._matcher))
            self._guard.push(token_id)
            if self._matcher.is_stopped():
                return count
        return len(token_ids)

    def num_allowed(self, draft_token_ids: Sequence[int]) -> int:
        return self._matcher.validate_tokens(list(draft_token_ids))

    def _masks_behind(self, draft_token_ids: Sequence[int]) -> list[TokenMask | None]:
        """A copy takes the drafts, which costs microseconds and can always be thrown away."""
        scout, guard = self._matcher.deep_copy(), self._guard.copy()
        masks: list[TokenMask | None] = [None] * len(draft_token_ids)
        for index, token_id in enumerate(draft_token_ids):
            if scout.is_stopped() or not scout.try_consume_tokens([token_id]):
                break
            guard.push(token_id)
            mask = masks[index] = self._buffer[1 + index]
            _fill_mask(scout, mask)
            guard.narrow(scout, mask)
        return masks


def _compile(vocabulary: _Vocabulary, text: str) -> LLMatcher:
    tokenizer = vocabulary.tokenizer
    if any(spelled in text for spelled in vocabulary.control_texts):
        text = _in_any_tokens(text)
    limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(_reason(matcher))
    try:
        _fill_mask(matcher, np.zeros(-(-tokenizer.vocab_size // _WORD_BITS), np.int32))
    except GrammarError as error:
        if str(error).startswith("NoExtension"):
            raise GrammarError("it matches no text at all") from error
        raise
    return matcher


def _in_any_tokens(text: str) -> str:
    """The same grammar inside one that leaves it to the model which tokens make a text."""
    try:
        first, *others = json.loads(text)["grammars"] if text.startswith("{") else [text]
    except (ValueError, KeyError, TypeError):
        return text  # the library says what is wrong with it
    inner: dict[str, Any] = first if isinstance(first, dict) else {"lark_grammar": first}
    outer = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @whole'}
    return json.dumps({"grammars": [outer, inner | {"name": "whole"}, *others]})


def _fill_mask(matcher: LLMatcher, mask: TokenMask) -> None:
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if matcher.is_error():
        raise GrammarError(_reason(matcher))


def _reason(matcher: LLMatcher) -> str:
    """The library's reason without the parser's state that may follow it."""
    text = matcher.get_error().split("\n<", 1)[0].strip()
    return text[:_MAX_REASON_CHARS] or "the grammar's parser failed"
