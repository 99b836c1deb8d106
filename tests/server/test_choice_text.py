from hypothesis import given
from hypothesis import strategies as st

from engine.logprobs import TokenLogprobs
from server.choice_text import ChoiceText, TextOptions
from tests.server.byte_tokenizer import IM_END, byte_tokenizer
from tests.server.scripted_client import scored_all

TOKENIZER = byte_tokenizer()
Shown = tuple[str, tuple[TokenLogprobs, ...]]


def run(data: bytes, options: TextOptions, sizes: list[int]) -> tuple[str, list[int], int]:
    """Text, token ids of the logprobs, and number of tokens, for data in steps of `sizes`."""
    choice, rest, shown = ChoiceText(TOKENIZER, options), list(data), list[Shown]()
    for size in sizes:
        step, rest = rest[:size], rest[size:]
        shown.append(choice.push(step, scored_all(step), None))
        if choice.stopped:
            break
    shown.append(choice.finish())
    ids = [entry.token_id for _, entries in shown for entry in entries]
    return "".join(text for text, _ in shown), ids, choice.num_tokens


@given(st.text("ab😀", max_size=12), st.lists(st.integers(1, 6), min_size=48, max_size=48))
def test_text_logprobs_and_count_do_not_depend_on_the_steps(text: str, sizes: list[int]) -> None:
    options, data = TextOptions(stop=("ab", "😀b")), text.encode()
    assert run(data, options, sizes) == run(data, options, [1] * 48)


@given(st.text(max_size=12))
def test_the_bytes_of_the_logprobs_are_the_bytes_of_the_text(text: str) -> None:
    shown, ids, _ = run(text.encode(), TextOptions(stop=("never",)), [1] * 48)
    assert bytes(ids) == shown.encode() == text.encode()


def test_a_partial_character_waits_with_its_logprob() -> None:
    choice = ChoiceText(TOKENIZER, TextOptions())
    first, *_, last = [choice.push([b], scored_all([b]), None) for b in "é".encode()]
    assert first == ("", ())
    assert (last[0], [e.token_id for e in last[1]]) == ("é", list("é".encode()))


def test_tokens_behind_a_stop_string_have_no_logprob_and_do_not_count() -> None:
    assert run(b"xxSTOPyy", TextOptions(stop=("STOP",)), [8]) == ("xx", [120, 120], 6)


def test_a_stop_string_is_not_looked_for_before_min_tokens() -> None:
    assert run(b"aab", TextOptions(stop=("a",), min_tokens=1), [1] * 3) == ("a", [97], 2)


def test_a_stop_token_is_counted_but_is_no_text() -> None:
    choice = ChoiceText(TOKENIZER, TextOptions(skip_special_tokens=False))
    text, entries = choice.push([97, IM_END], scored_all([97, IM_END]), IM_END)
    assert (text, [e.token_id for e in entries], choice.num_tokens) == ("a", [97], 2)


def test_a_stop_token_keeps_its_logprob_where_every_one_is_wanted() -> None:
    choice = ChoiceText(TOKENIZER, TextOptions(keeps_every_logprob=True))
    _, entries = choice.push([97, IM_END], scored_all([97, IM_END]), IM_END)
    assert [e.token_id for e in entries] == [97, IM_END]
