"""The tokenizer that is built from a GGUF's metadata, and the sets of special tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.errors import ImportFailed
from engine.importers.gguf_metadata import Metadata
from engine.importers.gguf_reader import Value as ReadValue
from engine.importers.gguf_reader import open_gguf
from engine.importers.gguf_tokenizer import build_tokenizer
from engine.importers.tokenizer_parts import TokenizerParts
from tests.engine.gguf_files import GgufParts, Value, tiny_tokenizer_metadata, write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


def build(folder: Path, changes: dict[str, Value | None] | None = None) -> TokenizerParts:
    """From the tiny vocabulary with `changes` below `tokenizer.ggml.` (None deletes a key)."""
    metadata = tiny_tokenizer_metadata(320)
    for key, value in (changes or {}).items():
        if value is None:
            del metadata[f"tokenizer.ggml.{key}"]
        else:
            metadata[f"tokenizer.ggml.{key}"] = value
    file = open_gguf(write_gguf(folder / "a.gguf", GgufParts(metadata, {})))
    values: dict[str, ReadValue] = file.metadata
    return build_tokenizer(Metadata(file.path, values))


def refusal(folder: Path, changes: dict[str, Value | None]) -> str:
    with pytest.raises(ImportFailed) as caught:
        build(folder, changes)
    return str(caught.value)


def loaded(folder: Path, changes: dict[str, Value | None] | None = None) -> Tokenizer:
    return Tokenizer.from_str(build(folder, changes).json)


def pieces(folder: Path, pre: str, text: str) -> list[str]:
    pre_tokenizer = loaded(folder, {"pre": pre}).pre_tokenizer
    return [piece.replace("Ġ", " ") for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


def test_merges_apply_and_special_tokens_are_single_ids(folder: Path) -> None:
    encoding = loaded(folder).encode("<|im_start|> the\n<|im_end|>")
    assert encoding.tokens == ["<|im_start|>", "Ġt", "he", "Ċ", "<|im_end|>"]
    assert (encoding.ids[0], encoding.ids[-1]) == (1, 2)


def test_nothing_is_added_to_a_text(folder: Path) -> None:
    assert loaded(folder, {"add_bos_token": True}).encode("a").tokens == ["a"]


TINY = tiny_tokenizer_metadata(320)


@given(text=st.text(max_size=40))
def test_every_text_survives_encoding_and_decoding(text: str) -> None:
    values: dict[str, ReadValue] = {}
    for key, value in TINY.items():
        if isinstance(value, bool | int | float | str):
            values[key] = value
        elif key != "tokenizer.ggml.token_type":
            values[key] = [str(item) for item in value]
    tokenizer = Tokenizer.from_str(build_tokenizer(Metadata(Path("memory"), values)).json)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        (
            "smollm",
            ["It", "'s", " ", "1", "2", "3", "4", " don", "'t", " I", "'", "LL", "  ", " x"],
        ),
        ("gpt-2", ["It", "'s", " 1234", " don", "'t", " I", "'", "LL", "  ", " x"]),
        ("llama-bpe", ["It", "'s", " ", "123", "4", " don", "'t", " I", "'LL", "  ", " x"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", " don", "'t", " I", "'LL", "  ", " x"]),
    ],
)
def test_each_pre_tokenizer_splits_as_published(
    folder: Path, pre: str, expected: list[str]
) -> None:
    assert pieces(folder, pre, "It's 1234 don't I'LL   x") == expected


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_newlines_end_pieces_as_published(folder: Path, pre: str) -> None:
    assert pieces(folder, pre, "a.\n\nb \n c") == ["a", ".ĊĊ", "b", " Ċ", " c"]


@pytest.mark.parametrize("pre", ["made-up", "default", None])
def test_unknown_and_missing_pre_tokenizers_are_errors_that_list_the_known(
    folder: Path, pre: str | None
) -> None:
    message = refusal(folder, {"pre": pre})
    assert "supported: gpt-2, olmo, smollm, " in message and "llama-bpe" in message
    assert ("names no pre-tokenizer" if pre is None else repr(pre)) in message


def test_other_tokenizer_models_are_refused(folder: Path) -> None:
    assert "unsupported tokenizer 't5'; supported: gpt2" in refusal(folder, {"model": "t5"})


def test_user_defined_tokens_are_whole_but_not_special(folder: Path) -> None:
    types = [3, 3, 3] + [1] * 317
    types[319] = 4
    tokenizer = loaded(folder, {"token_type": types})
    added = tokenizer.get_added_tokens_decoder()
    assert not added[319].special
    assert added[1].special
    assert tokenizer.encode(f"x{added[319].content}").ids[-1] == 319


def test_end_tokens_are_the_union_of_every_source_the_named_ones_first(folder: Path) -> None:
    parts = build(folder, {"eos_token_id": 5, "eot_token_id": 6, "eom_token_id": 7})
    assert parts.eos_token_ids == (5, 6, 7, 0, 2)


def test_end_tokens_may_be_a_list(folder: Path) -> None:
    assert build(folder, {"eos_token_id": [4, 9]}).eos_token_ids == (4, 9, 0, 2)


def test_known_end_tokens_are_special_whatever_type_the_file_gives(folder: Path) -> None:
    tokenizer = loaded(folder, {"token_type": [1] * 320})
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert tokenizer.decode([2], skip_special_tokens=True) == ""


@pytest.mark.parametrize("key", ["eos_token_id", "eot_token_id", "eom_token_id", "bos_token_id"])
def test_special_ids_out_of_range_are_refused(folder: Path, key: str) -> None:
    message = refusal(folder, {key: 320})
    assert f"'tokenizer.ggml.{key}' is 320, expected an integer from 0 to 319" in message


def test_bos_follows_the_file_and_then_the_format(folder: Path) -> None:
    assert build(folder, {"add_bos_token": True}).add_bos
    assert not build(folder, {"add_bos_token": None}).add_bos
    assert build(folder, {"add_bos_token": None, "pre": "llama-bpe"}).add_bos
    assert not build(folder, {"add_bos_token": False, "pre": "llama-bpe"}).add_bos


def test_adding_a_bos_that_does_not_exist_is_refused(folder: Path) -> None:
    message = refusal(folder, {"add_bos_token": True, "bos_token_id": None})
    assert "'tokenizer.ggml.bos_token_id' is missing" in message


def test_merges_of_tokens_that_do_not_exist_are_refused(folder: Path) -> None:
    assert "the merge 'Ġ zz' in tokenizer.ggml.merges" in refusal(folder, {"merges": ["Ġ zz"]})


def test_tokens_that_appear_twice_are_refused(folder: Path) -> None:
    tokens = TINY["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    twice = [*(str(token) for token in tokens[:-1]), "a"]
    assert "token 'a' appears twice" in refusal(folder, {"tokens": twice})


def test_a_vocabulary_without_plain_letters_is_refused(folder: Path) -> None:
    message = refusal(folder, {"tokens": ["<|im_end|>", "b"]})
    assert "has no token for '!' and" in message


def test_a_list_of_types_of_another_length_is_refused(folder: Path) -> None:
    message = refusal(folder, {"token_type": [1, 2]})
    assert "expected 320 entries, one per token, not 2" in message
