"""The tokenizer of a BERT-family model, as the text of one tokenizer.json.

Published as tokenizer.json, or for old BERT models as vocab.txt alone, of which the same is
built. It must put the special tokens around a text by itself. Does not encode anything.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import normalizers
from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer

from engine.errors import ImportFailed
from engine.importers.json_file import read_optional_settings, read_text_file

TOKENIZER_FILE = "tokenizer.json"
VOCABULARY_FILE = "vocab.txt"
_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read_tokenizer(folder: Path, vocab_size: int, lowercases: bool) -> str:
    """`lowercases`: every text is lower-cased first, whatever the tokenizer does by itself.

    Raises ImportFailed: there is none, or it does not fit the model.
    """
    path = folder / TOKENIZER_FILE
    tokenizer = _parse(path) if path.exists() else _build(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if lowercases:
        parts = [normalizers.Lowercase(), tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([part for part in parts if part is not None])
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids or max(ids) >= vocab_size:
        raise ImportFailed(
            f"{folder}: its tokenizer has {len(ids)} tokens with ids up to "
            f"{max(ids, default=-1)}, the model has {vocab_size}; download the model again"
        )
    if tokenizer.num_special_tokens_to_add(False) < 1:
        raise ImportFailed(
            f"{path} puts no special tokens around a text, as models of this family need; "
            "use another conversion of the model"
        )
    return str(tokenizer.to_str())


def read_pair_separator(folder: Path, tokenizer_json: str) -> int:
    """The id of the special token that ends the first text of a pair.

    Raises ImportFailed: the tokenizer puts none there, so pairs cannot be told apart.
    """
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    pair = tokenizer.encode("a", "a")
    special = pair.special_tokens_mask
    first = special.index(0) if 0 in special else len(special)
    if 1 not in special[first:] or 0 not in special[special.index(1, first) :]:
        raise ImportFailed(
            f"{folder}: its tokenizer puts no special token between two texts, as a cross-encoder "
            "needs; use another conversion of the model"
        )
    separator: int = pair.ids[special.index(1, first)]
    return separator


def _parse(path: Path) -> tokenizers.Tokenizer:
    text = read_text_file(path)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as exc:  # the library raises bare Exceptions
        reason = " ".join(str(exc).split())[:200]
        raise ImportFailed(f"{path} is not a tokenizer: {reason}; download it again") from exc


def _build(folder: Path) -> tokenizers.Tokenizer:
    """A WordPiece tokenizer from `vocab.txt`, one token a line in the order of the ids."""
    path = folder / VOCABULARY_FILE
    if not path.exists():
        raise ImportFailed(
            f"{folder} has neither {TOKENIZER_FILE} nor {VOCABULARY_FILE}; "
            "give the folder of a whole model"
        )
    # Not `splitlines`: some tokens are themselves what that takes for the end of a line.
    lines = read_text_file(path).removesuffix("\n").split("\n")
    vocabulary = {line.removesuffix("\r"): index for index, line in enumerate(lines)}
    if missing := [token for token in _SPECIAL_TOKENS if token not in vocabulary]:
        raise ImportFailed(f"{path} has no token {missing[0]!r}; download it again")
    settings = read_optional_settings(folder / "tokenizer_config.json")
    lowercase = settings.boolean("do_lower_case", True)
    strips_accents = "strip_accents" in settings
    built = BertWordPieceTokenizer(
        vocabulary,
        handle_chinese_chars=settings.boolean("tokenize_chinese_chars", True),
        strip_accents=settings.boolean("strip_accents", lowercase) if strips_accents else None,
        lowercase=lowercase,
    )
    return tokenizers.Tokenizer.from_str(built.to_str())
