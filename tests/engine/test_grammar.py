"""Grammars over a vocabulary of bytes: masks, moves, drafts, ends and failures."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from engine.grammar import UNCONSTRAINED, Grammar, GrammarError, NoGrammars, TokenMask
from engine.grammar_matcher import GrammarFactory, MatcherGrammar
from tests.server.byte_tokenizer import IM_END, VOCAB_SIZE, byte_tokenizer_json

MODEL_VOCAB_SIZE = VOCAB_SIZE + 5
END = [IM_END]


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def new_factory() -> GrammarFactory:
    return GrammarFactory(byte_tokenizer_json, END, MODEL_VOCAB_SIZE)


FACTORY = new_factory()


def grammar(text: str) -> Grammar:
    return FACTORY.create(lark(text))


def allowed(mask: TokenMask | None) -> list[int]:
    assert mask is not None
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def next_tokens(subject: Grammar, drafts: Sequence[int] = ()) -> list[int]:
    return allowed(subject.masks(drafts)[-1])


def test_the_mask_is_what_may_come_next() -> None:
    subject = grammar('start: "yes" | "no"')
    assert next_tokens(subject) == list(b"ny")
    assert subject.accept(b"y") == 1
    assert next_tokens(subject) == list(b"e")


def test_an_end_token_may_come_where_the_output_is_complete() -> None:
    subject = grammar('start: "a"+')
    assert next_tokens(subject) == list(b"a")
    subject.accept(b"a")
    assert next_tokens(subject) == [ord("a"), IM_END]
    assert not subject.is_terminated
    assert subject.accept(END) == 1
    assert subject.is_terminated


def test_the_output_terminates_with_the_token_after_which_nothing_can_come() -> None:
    subject = grammar('start: "yes" | "no"')
    assert subject.accept(b"yes!?") == 3
    assert subject.is_terminated
    assert next_tokens(subject) == END


def test_an_output_that_may_be_empty_begins_with_an_end_token() -> None:
    subject = grammar('start: "" | "a"')
    assert next_tokens(subject) == [ord("a"), IM_END]


def test_drafts_have_the_masks_of_their_prefixes_and_change_nothing() -> None:
    subject = grammar('start: "abc" | "axy"')
    masks = subject.masks(b"ab")
    assert [allowed(mask) for mask in masks] == [list(b"a"), list(b"bx"), list(b"c")]
    assert next_tokens(subject) == list(b"a")


def test_behind_a_draft_that_may_not_come_nothing_is_asked() -> None:
    first, second, third = grammar('start: "abc"').masks(b"az")
    assert (allowed(first), allowed(second), third) == (list(b"a"), list(b"b"), None)


def test_behind_the_end_of_the_output_only_an_end_token_may_come() -> None:
    complete, behind = grammar('start: "a"').masks(b"ab")[1:]
    assert (allowed(complete), behind) == (END, None)


def test_more_drafts_than_before_have_room() -> None:
    subject = grammar('start: "a"+')
    assert len(subject.masks(b"")) == 1
    assert [allowed(mask)[0] for mask in subject.masks(b"aaaa")] == list(b"aaaaa")


@pytest.mark.parametrize(
    ("drafts", "count"), [(b"", 0), (b"yes", 3), (b"yet", 2), (b"x", 0), (b"ye", 2)]
)
def test_drafts_are_counted_up_to_the_first_that_may_not_come(drafts: bytes, count: int) -> None:
    assert grammar('start: "yes" | "no"').num_allowed(drafts) == count


def test_a_grammar_that_cannot_roll_back_still_takes_drafts() -> None:
    subject = grammar('start: a "x"\na[max_tokens=3]: /b*/')
    assert [allowed(mask) for mask in subject.masks(b"b")] == [list(b"bx"), list(b"bx")]
    assert subject.accept(b"bx") == 2


def test_a_token_that_may_not_come_is_an_error_and_so_is_all_that_follows() -> None:
    subject = grammar('start: "yes"')
    with pytest.raises(GrammarError, match="doesn't satisfy the grammar"):
        subject.accept(b"n")
    with pytest.raises(GrammarError):
        subject.masks([])
    assert not subject.is_terminated


def test_a_matcher_that_gives_up_is_an_error_and_no_mask() -> None:
    many = range(3000)
    rules = "\n".join(f'r{i}: "x" s{i}\ns{i}: /[a-c]/ | "{i}" s{i}' for i in many)
    subject = grammar(f'start: "k" ({" | ".join(f"r{i}" for i in many)})\n{rules}')
    assert next_tokens(subject) == list(b"k")
    with pytest.raises(GrammarError):
        subject.accept(b"k")
        subject.masks([])
    assert not subject.is_terminated


def test_the_bits_reach_to_the_end_of_the_models_vocabulary() -> None:
    (mask,) = grammar("start: /.*/").masks([])
    assert mask is not None
    assert mask.dtype == np.int32
    assert len(mask) == -(-MODEL_VOCAB_SIZE // 32)
    assert max(allowed(mask)) == IM_END


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (lark("start: missing"), 'unknown name: "missing"'),
        (lark("start: /([a-z/"), "unclosed character class"),
        (lark("start: start"), "matches no text at all"),
        (lark("start: a\na: b\nb: a"), "matches no text at all"),
        (lark('start: <|nobody|> "a"'), "unknown special token"),
        ("{}", "missing field"),
        ("{", "EOF"),
    ],
)
def test_a_text_that_is_no_usable_grammar_is_refused_with_the_reason(
    text: str, reason: str
) -> None:
    with pytest.raises(GrammarError, match=reason) as error:
        FACTORY.create(text)
    assert len(str(error.value)) <= 500


def test_a_grammar_may_ask_for_control_tokens() -> None:
    assert len(next_tokens(grammar('start: <|im_start|> "a"'))) == 1


@pytest.mark.parametrize("text", ['start: "a<|im_end|>b"', 'start: "a" x\nx: "<|im_end|>b"'])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_text_that_spells_a_control_token_is_made_of_other_tokens(
    text: str, is_wrapped: bool
) -> None:
    subject = FACTORY.create(lark(text) if is_wrapped else text)
    for byte in b"a<|im_end|>b":
        assert next_tokens(subject) == [byte]
        assert subject.accept([byte]) == 1
    assert subject.is_terminated


def test_sequences_of_one_grammar_do_not_meet() -> None:
    first, second = grammar('start: "ab"'), grammar('start: "ab"')
    first.accept(b"a")
    assert (next_tokens(first), next_tokens(second)) == (list(b"b"), list(b"a"))


def test_the_tokenizer_is_read_with_the_first_grammar_and_once() -> None:
    calls = []

    def read() -> str:
        calls.append(1)
        return byte_tokenizer_json()

    factory = GrammarFactory(read, END, MODEL_VOCAB_SIZE)
    assert factory.create("") is UNCONSTRAINED
    assert calls == []
    for text in ('start: "a"', 'start: "b"'):
        factory.create(lark(text))
    assert calls == [1]


def test_more_grammars_than_the_cache_holds_all_work() -> None:
    for index in [*range(100), 0]:
        assert next_tokens(grammar(f'start: "{index:03}"')) == [ord("0")]


def test_threads_can_share_a_factory() -> None:
    factory, firsts = new_factory(), []

    def use() -> None:
        firsts.append(next_tokens(factory.create(lark('start: "k"'))))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert firsts == [[ord("k")]] * 8


def test_a_tokenizer_that_cannot_be_read_is_a_grammar_error() -> None:
    factory = GrammarFactory(lambda: '{"model": {}}', END, MODEL_VOCAB_SIZE)
    with pytest.raises(GrammarError, match="tokenizer cannot be constrained"):
        factory.create(lark('start: "a"'))


def test_without_a_grammar_everything_may_come() -> None:
    assert list(UNCONSTRAINED.masks([1, 2])) == [None, None, None]
    assert UNCONSTRAINED.accept([1, 2]) == UNCONSTRAINED.num_allowed([1, 2]) == 2
    assert not UNCONSTRAINED.is_terminated
    assert isinstance(grammar('start: "a"'), MatcherGrammar)


def test_an_engine_without_grammars_refuses_them() -> None:
    assert NoGrammars().create("") is UNCONSTRAINED
    with pytest.raises(GrammarError, match="cannot enforce"):
        NoGrammars().create("x")
