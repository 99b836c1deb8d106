import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.token_bytes import byte_level_alphabet, token_decoder
from server.tokenizer import Tokenizer
from tests.server.byte_tokenizer import (
    BOS,
    IM_END,
    IM_START,
    VOCAB_SIZE,
    byte_tokenizer,
    byte_tokenizer_json,
    sentencepiece_tokenizer,
)

MARK = "\ufdd0"


def test_the_byte_level_alphabet_has_every_byte_once() -> None:
    assert sorted(byte_level_alphabet().values()) == list(range(256))
    assert byte_level_alphabet()["Ġ"] == 0x20
    assert byte_level_alphabet()["Ċ"] == 0x0A


@given(st.text())
def test_plain_text_encodes_to_its_bytes_and_back(text: str) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode_plain(text) == list(text.encode())
    assert b"".join(map(tokenizer.token_bytes, text.encode())) == text.encode()


def test_a_control_token_is_text_when_plain_and_one_id_when_parsed() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode_plain("<|im_end|>") == list(b"<|im_end|>")
    assert tokenizer.encode_parsed("a<|im_end|>") == [97, IM_END]
    assert tokenizer.special_token_ids == {BOS, IM_START, IM_END}


def test_added_tokens_are_their_literal_bytes_and_unknown_ids_are_empty() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.token_bytes(IM_END) == b"<|im_end|>"
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.token_bytes(VOCAB_SIZE) == tokenizer.token_bytes(-1) == b""


def test_the_space_marks_of_an_added_sentencepiece_token_are_spaces() -> None:
    description = json.loads(sentencepiece_tokenizer().to_json())
    new_id = sentencepiece_tokenizer().vocab_size
    description["added_tokens"].append(
        {"id": new_id, "content": "▁▁", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": False}
    )  # fmt: skip
    assert Tokenizer(json.dumps(description)).token_bytes(new_id) == b"  "


def test_bos_is_put_once_and_only_if_wanted() -> None:
    wants, does_not = byte_tokenizer(add_bos=True), byte_tokenizer()
    assert wants.encode_parsed("a") == wants.encode_parsed("<s>a") == [BOS, 97]
    assert wants.encode_parsed("a", add_bos=False) == does_not.encode_parsed("a") == [97]
    assert wants.encode_rendered("<s>a", MARK) == [BOS, 97]


def test_a_broken_control_token_in_a_rendered_prompt_is_ordinary_bytes() -> None:
    tokenizer = byte_tokenizer()
    forged = tokenizer.break_special("x<|im_end|>", MARK)
    ids = tokenizer.encode_rendered(f"<|im_start|>{forged}<|im_end|>", MARK)
    assert ids == [IM_START, *b"x<|im_end|>", IM_END]


def test_breaking_a_token_leaves_no_shorter_token_inside_it() -> None:
    description = json.loads(byte_tokenizer_json())
    for i, text in enumerate(["<<a>>", "<a>"]):
        description["added_tokens"].append(
            {**description["added_tokens"][0], "id": 259 + i, "content": text}
        )
    tokenizer = Tokenizer(json.dumps(description))
    broken = tokenizer.break_special("<<a>>", MARK)
    assert tokenizer.encode_rendered(broken, MARK) == list(b"<<a>>")


def test_rstrip_of_a_control_token_swallows_the_space_behind_it() -> None:
    description = json.loads(byte_tokenizer_json())
    description["added_tokens"][2]["rstrip"] = True
    tokenizer = Tokenizer(json.dumps(description))
    assert tokenizer.encode_rendered("a<|im_end|>\n b", "") == [97, IM_END, 98]
    assert tokenizer.encode_parsed("a<|im_end|>\n b") == [97, IM_END, 98]


def test_sentencepiece_tokens_are_spaces_and_bytes() -> None:
    tokenizer = sentencepiece_tokenizer()
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"
    assert tokenizer.decode([259, 260, 261]) == " two  spaces"
    assert tokenizer.strips_leading_space


def test_only_the_first_piece_of_a_sentencepiece_prompt_gets_a_space() -> None:
    tokenizer = sentencepiece_tokenizer()
    first = tokenizer.decode(tokenizer.encode_plain("and"))
    inner = tokenizer.decode(tokenizer.encode_plain("and", at_start=False))
    assert (first, inner) == (" and", "and")


def test_a_wordpiece_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match="WordPiece"):
        token_decoder({"decoder": {"type": "WordPiece"}})


MERGES = (("Ġ", "a"), ("a", "b"), ("Ġa", "b"), ("Ċ", "Ċ"), ("a", "s"))


@given(st.lists(st.text("ab \nsé<|", max_size=8), max_size=4))
def test_a_rendered_prompt_without_forgery_encodes_as_tokenizers_itself_does(
    contents: list[str],
) -> None:
    tokenizer = Tokenizer(byte_tokenizer_json(MERGES))
    text = "".join(f"<|im_start|>assistant\n{content}<|im_end|>\n" for content in contents)
    assert tokenizer.encode_rendered(text, MARK) == tokenizer.encode_parsed(text)
    assert tokenizer.decode(tokenizer.encode_plain(text)) == text
