from hypothesis import given
from hypothesis import strategies as st

from server.detokenizer import Detokenizer
from tests.server.byte_tokenizer import IM_END, byte_tokenizer, sentencepiece_tokenizer

TOKENIZER = byte_tokenizer()


def decoded(token_ids: bytes | list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@given(st.text())
def test_text_that_was_split_into_bytes_comes_back_whole(text: str) -> None:
    pieces = decoded(text.encode())
    assert "".join(pieces) == text
    assert sum("\ufffd" in piece for piece in pieces) == text.count("\ufffd")


@given(st.binary())
def test_any_bytes_give_the_text_of_a_whole_decode(data: bytes) -> None:
    assert "".join(decoded(data)) == data.decode("utf-8", "replace")


def test_an_emoji_appears_with_its_last_byte() -> None:
    assert decoded("😀".encode()) == ["", "", "", "😀", ""]


def test_an_incomplete_tail_becomes_one_replacement_character() -> None:
    for length in (1, 2, 3):
        assert decoded(b"ab" + "😀".encode()[:length])[-1] == "\ufffd"


def test_special_tokens_are_skipped_or_shown() -> None:
    assert decoded([97, IM_END, 98]) == ["a", "", "b", ""]
    shown = Detokenizer(TOKENIZER, skip_special_tokens=False)
    assert shown.push(IM_END) == "<|im_end|>"


def test_sentencepiece_spaces_survive_and_only_the_very_first_may_be_dropped() -> None:
    tokenizer, ids = sentencepiece_tokenizer(), [259, 260, 261, 262, 263]
    keeps, drops = Detokenizer(tokenizer), Detokenizer(tokenizer, strips_leading_space=True)
    assert "".join(map(keeps.push, ids)) == " two  spacesand a"
    assert "".join(map(drops.push, ids)) == "two  spacesand a"
