"""The tokenizer of a folder: which file counts, which tokens are special, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.errors import ImportFailed
from engine.importers.hf_tokenizer import NamedTokens, read_hf_tokenizer
from engine.importers.tokenizer_parts import TokenizerParts
from tests.engine.hf_folders import VOCAB, write_tokenizer

NONE = NamedTokens(None, ())


def read(
    folder: Path, named: NamedTokens = NONE, size: int = VOCAB, **files: Any
) -> TokenizerParts:
    """`files` are JSON files by their stem."""
    write_tokenizer(folder)
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content), "utf-8")
    return read_hf_tokenizer(folder, size, named)


def refusal(folder: Path, **changes: Any) -> str:
    with pytest.raises(ImportFailed) as caught:
        read(folder, **changes)
    return str(caught.value)


def test_the_bos_that_is_put_first_is_told_and_not_put_any_more(tmp_path: Path) -> None:
    parts = read(tmp_path)
    assert (parts.bos_token_id, parts.add_bos, parts.vocab_size) == (1, True, VOCAB)
    plain = Tokenizer.from_str(parts.json)
    assert plain.encode("the", add_special_tokens=True).ids == plain.encode("the").ids
    assert plain.encode("the").ids[0] != 1


@pytest.mark.parametrize(
    ("config", "named", "expected"),
    [
        ({}, NONE, (1, True)),
        ({"add_bos_token": False}, NONE, (1, False)),
        ({"bos_token": "<|endoftext|>"}, NONE, (0, True)),
        ({"bos_token": {"content": "<|im_end|>"}}, NamedTokens(5, ()), (2, True)),
        ({"bos_token": None}, NamedTokens(5, ()), (1, True)),
    ],
)
def test_bos(
    tmp_path: Path, config: Any, named: NamedTokens, expected: tuple[int | None, bool]
) -> None:
    parts = read(tmp_path, named, tokenizer_config=config)
    assert (parts.bos_token_id, parts.add_bos) == expected


def test_the_end_token_of_the_tokenizer_comes_first(tmp_path: Path) -> None:
    parts = read(tmp_path, NamedTokens(None, (9, 2)), tokenizer_config={"eos_token": "the"})
    assert parts.eos_token_ids == (9, 2, 0)
    parts = read(tmp_path, NamedTokens(None, (9, 2)), tokenizer_config={"eos_token": "<|im_end|>"})
    assert parts.eos_token_ids == (2, 9, 0)


def test_tokens_that_came_later_are_added(tmp_path: Path) -> None:
    decoder = {
        "320": {"content": "<|tool|>", "special": True},
        "321": {"content": "<think>", "special": False, "normalized": False},
    }
    parts = read(
        tmp_path, size=400, tokenizer_config={"added_tokens_decoder": decoder},
        added_tokens={"<|more|>": 322},
    )  # fmt: skip
    tokenizer = Tokenizer.from_str(parts.json)
    assert tokenizer.encode("<|tool|><think><|more|>").ids == [320, 321, 322]
    added = tokenizer.get_added_tokens_decoder()
    assert [added[id].special for id in (320, 321, 322)] == [True, False, False]
    assert parts.vocab_size == 323


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"size": 319}, "has 320 tokens with ids up to 319, the model has 319"),
        ({"added_tokens": {"<|gap|>": 350}, "size": 400}, "is number 350 in one file and 320"),
        ({"added_tokens": {"<|x|>": "no"}}, "gives '<|x|>' no token id"),
        ({"added_tokens": []}, "is not a JSON object"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "y"}}}},
            "its added token 'x' is damaged",
        ),
        ({"named": NamedTokens(999, ()), "tokenizer_config": {}, "size": 400}, None),
        ({"named": NamedTokens(None, (999,))}, "the special token 999 is not one of 320"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str | None
) -> None:
    if said is None:  # a BOS that the tokenizer itself overrules is never looked at
        assert read(tmp_path, **changes).bos_token_id == 1
    else:
        assert said in refusal(tmp_path, **changes)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportFailed, match="has neither tokenizer.json nor tokenizer.model"):
        read_hf_tokenizer(tmp_path, VOCAB, NONE)
