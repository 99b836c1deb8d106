"""The tokenizer of a Hugging Face folder, as the text of one tokenizer.json.

    tokenizer.json           taken as it is, or
    tokenizer.model          SentencePiece, of which one is built
    tokenizer_config.json    which tokens are special, and whether a BOS is put first
    added_tokens.json        tokens that came later

The result puts no special tokens around a text by itself: whether a BOS is wanted is in the parts.
Encodes nothing but one letter, to see what the published tokenizer puts before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from engine.errors import ImportFailed
from engine.importers.json_file import read_object, read_text_file
from engine.importers.native_calls import refusing
from engine.importers.sentencepiece_model import CONTROL, USER_DEFINED, read_sentencepiece
from engine.importers.sentencepiece_tokenizer import SentencePieceSettings, build_sentencepiece
from engine.importers.tokenizer_parts import KNOWN_END_TOKENS, TokenizerParts, end_tokens

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
CONFIG_FILE = "tokenizer_config.json"
ADDED_FILE = "added_tokens.json"
MAX_TOKENS = 1 << 22
PROBE = "Aß 你 \u0301👋\n"
"""Encoded once, so that a tokenizer that cannot is refused at import and not at a request."""

_TURN_TOKENS = frozenset({"<start_of_turn>", *KNOWN_END_TOKENS})


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """Token ids that config.json and generation_config.json name."""

    bos: int | None
    eos: tuple[int, ...]


def read_hf_tokenizer(folder: Path, vocab_size: int, named: NamedTokens) -> TokenizerParts:
    """`vocab_size` is the number of rows of the embedding, which may be padded.

    Raises ImportFailed: there is no tokenizer, it is damaged, or it does not fit the model.
    """
    config = _optional_object(folder / CONFIG_FILE)
    added = _added_tokens(folder, config)
    with refusing(f"{folder} has a damaged tokenizer"):
        found = _read_published(folder, config, added)
        found.tokenizer.encode(PROBE)
    tokenizer = found.tokenizer
    _extend(folder, tokenizer, added)
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    _check_size(folder, vocabulary, vocab_size)
    bos = _first_of(_token_id(config.get("bos_token"), vocabulary), found.bos, named.bos)
    eos = _first_of(_token_id(config.get("eos_token"), vocabulary), found.eos)
    eos_ids = [id for id in (eos, *named.eos) if id is not None]
    _check_ids(folder, [*eos_ids, *([] if bos is None else [bos])], vocab_size)
    tokenizer.post_processor = None
    return TokenizerParts(
        json=tokenizer.to_str(),
        kind=found.kind,
        vocab_size=max(vocabulary.values()) + 1,
        bos_token_id=bos,
        eos_token_ids=end_tokens(eos_ids, vocabulary),
        add_bos=bos is not None and config.get("add_bos_token", found.adds_bos) is True,
    )


@dataclass(frozen=True, slots=True)
class PublishedTokenizer:
    """As the model's files have it: the tokens that it itself names, and whether it adds a BOS."""

    kind: str
    tokenizer: Tokenizer
    bos: int | None
    eos: int | None
    adds_bos: bool


def _read_published(
    folder: Path, config: Mapping[str, object], added: Mapping[int, AddedToken]
) -> PublishedTokenizer:
    if (folder / TOKENIZER_FILE).exists():
        tokenizer = _parse(folder / TOKENIZER_FILE)
        bos = _first_special(tokenizer)
        return PublishedTokenizer(TOKENIZER_FILE, tokenizer, bos, None, bos is not None)
    if (folder / SENTENCEPIECE_FILE).exists():
        return _build(folder, config, added)
    raise ImportFailed(
        f"{folder} has neither {TOKENIZER_FILE} nor {SENTENCEPIECE_FILE}; "
        "give the folder of a whole model"
    )


def _first_of(*ids: int | None) -> int | None:
    return next((id for id in ids if id is not None), None)


def _optional_object(path: Path) -> dict[str, object]:
    return read_object(path) if path.exists() else {}


def _parse(path: Path) -> Tokenizer:
    text = read_text_file(path)
    with refusing(f"{path} is not a tokenizer"):
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def _first_special(tokenizer: Tokenizer) -> int | None:
    """The token that is put before a text, if there is one."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    has_one = len(whole) > len(plain) and whole[: len(plain)] != plain
    return int(whole[0]) if has_one else None


def _build(
    folder: Path, config: Mapping[str, object], added: Mapping[int, AddedToken]
) -> PublishedTokenizer:
    """Models of this kind put a BOS first unless they say otherwise."""
    path = folder / SENTENCEPIECE_FILE
    model = read_sentencepiece(path)
    legacy = config.get("legacy", True) is not False
    prefix = config.get("add_prefix_space")
    has_prefix = prefix if isinstance(prefix, bool) else model.adds_dummy_prefix
    settings = SentencePieceSettings(
        kind=model.kind,
        unk_id=model.unk_id,
        prefix="never" if not has_prefix else "always" if legacy else "first",
        charsmap=model.charsmap,
        removes_extra_whitespace=model.removes_extra_whitespace,
    )
    special = {
        index
        for index, piece in enumerate(model.pieces)
        if piece.kind == CONTROL or (piece.kind == USER_DEFINED and piece.text in _TURN_TOKENS)
    }
    special |= {id for id, token in added.items() if token.special and id < len(model.pieces)}
    with refusing(f"{path} contradicts itself"):
        tokenizer = build_sentencepiece(model.pieces, settings, special)
    named = range(len(model.pieces))
    bos, eos = (id if id in named else None for id in (model.bos_id, model.eos_id))
    return PublishedTokenizer("sentencepiece", tokenizer, bos, eos, adds_bos=True)


def _added_tokens(folder: Path, config: Mapping[str, object]) -> dict[int, AddedToken]:
    """Id → token of what was added to the vocabulary, as two files tell it."""
    added: dict[int, AddedToken] = {}
    for text, id in _optional_object(folder / ADDED_FILE).items():
        if not isinstance(id, int) or not 0 <= id < MAX_TOKENS:
            raise ImportFailed(f"{folder / ADDED_FILE} gives {text[:40]!r} no token id")
        added[id] = AddedToken(text, special=False, normalized=False)
    decoder = config.get("added_tokens_decoder", {})
    for key, item in decoder.items() if isinstance(decoder, dict) else ():
        content = item.get("content") if isinstance(item, dict) else None
        if not key.isdecimal() or len(key) > 7 or not isinstance(content, str):
            raise ImportFailed(f"{folder / CONFIG_FILE}: its added token {key[:40]!r} is damaged")
        flags = {
            flag: item[flag]
            for flag in ("special", "lstrip", "rstrip", "single_word", "normalized")
            if isinstance(item.get(flag), bool)
        }
        added[int(key)] = AddedToken(content, **flags)
    return added


def _extend(folder: Path, tokenizer: Tokenizer, added: Mapping[int, AddedToken]) -> None:
    """Adds what the vocabulary lacks. Raises ImportFailed where an id would not be kept."""
    for id, token in sorted(added.items()):
        if tokenizer.token_to_id(token.content) is None:
            add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
            add([token])
        if tokenizer.token_to_id(token.content) != id:
            raise ImportFailed(
                f"{folder}: the added token {token.content[:40]!r} is number {id} in one file and "
                f"{tokenizer.token_to_id(token.content)} in another; download the model again"
            )


def _check_size(folder: Path, vocabulary: Mapping[str, int], vocab_size: int) -> None:
    if not vocabulary or max(vocabulary.values()) >= vocab_size:
        raise ImportFailed(
            f"{folder}: its tokenizer has {len(vocabulary)} tokens with ids up to "
            f"{max(vocabulary.values(), default=-1)}, the model has {vocab_size}; "
            "download the model again"
        )


def _check_ids(folder: Path, ids: list[int], vocab_size: int) -> None:
    for id in ids:
        if not 0 <= id < vocab_size:
            raise ImportFailed(f"{folder}: the special token {id} is not one of {vocab_size}")


def _token_id(value: object, vocabulary: Mapping[str, int]) -> int | None:
    """Of a token's text, or of an object that holds it."""
    text = value.get("content") if isinstance(value, dict) else value
    return vocabulary.get(text) if isinstance(text, str) else None
