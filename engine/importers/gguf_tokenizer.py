"""Builds a `tokenizer.json` and the set of end tokens from a GGUF's metadata.

Byte-level BPE and SentencePiece's (`llama`). In the former, which regex splits the text before BPE
decides how digits and contractions become tokens, so the pre-tokenizer must be one of a known
list: an unknown one is an error, not a guess. Knows nothing about chat templates; BOS is a policy
of the caller, not of this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from engine.errors import ImportFailed
from engine.importers.gguf_metadata import Metadata
from engine.importers.native_calls import refusing
from engine.importers.sentencepiece_model import BPE as BPE_KIND
from engine.importers.sentencepiece_model import Piece
from engine.importers.sentencepiece_tokenizer import (
    SPACE,
    SentencePieceSettings,
    build_sentencepiece,
)
from engine.importers.tokenizer_parts import TokenizerParts, end_tokens

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

END_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

# Printable ASCII, and space and newline as GPT-2's alphabet writes them.
ESSENTIAL_CHARACTERS = "".join(map(chr, range(0x21, 0x7F))) + "ĠĊ"

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SLASHED_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Words that end where a capital begins ("camelCase" is two).
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CAPITAL_START = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+"
CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
THREE_DIGITS = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{PUNCTUATION_AND_SPACE}"


@dataclass(frozen=True, slots=True)
class PreTokenizerKind:
    """`regex`: the published pattern, or None for GPT-2's own, which is built into ByteLevel.

    `ignore_merges`: a word that is a token stays one token, whatever the merges say.
    `add_bos`: what the format's models expect when the file does not say.
    """

    regex: str | None = None
    split_digits: bool = False
    normalize_nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


PRE_TOKENIZERS: Mapping[str, PreTokenizerKind] = MappingProxyType(
    {
        "gpt-2": PreTokenizerKind(),
        "olmo": PreTokenizerKind(),
        "smollm": PreTokenizerKind(split_digits=True),
        "starcoder": PreTokenizerKind(split_digits=True),
        "refact": PreTokenizerKind(split_digits=True),
        "llama-bpe": PreTokenizerKind(regex=THREE_DIGITS, ignore_merges=True, add_bos=True),
        "dbrx": PreTokenizerKind(regex=THREE_DIGITS),
        "smaug-bpe": PreTokenizerKind(regex=THREE_DIGITS),
        "qwen2": PreTokenizerKind(
            regex=rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{PUNCTUATION_AND_SPACE}",
            normalize_nfc=True,
        ),
        "tekken": PreTokenizerKind(
            regex=rf"{CAPITAL_START}|{CAPITALS}|\p{{N}}|{SLASHED_PUNCTUATION}",
            ignore_merges=True,
            add_bos=True,
        ),
        "gpt-4o": PreTokenizerKind(
            regex=rf"{CAPITAL_START}{CONTRACTIONS}?|{CAPITALS}{CONTRACTIONS}?"
            rf"|\p{{N}}{{1,3}}|{SLASHED_PUNCTUATION}",
        ),
    }
)
# The same under other names, as llama.cpp treats them.
PRE_TOKENIZERS = MappingProxyType(
    {
        **PRE_TOKENIZERS,
        "phi-2": PRE_TOKENIZERS["gpt-2"],
        "llama-v3": PRE_TOKENIZERS["llama-bpe"],
        "llama3": PRE_TOKENIZERS["llama-bpe"],
        "falcon3": PRE_TOKENIZERS["llama-bpe"],
        "deepseek-r1-qwen": PRE_TOKENIZERS["qwen2"],
    }
)


def build_tokenizer(metadata: Metadata) -> TokenizerParts:
    """Raises ImportFailed for a kind of tokenizer or pre-tokenizer that is not known, and for
    vocabularies that contradict themselves."""
    model = metadata.string("tokenizer.ggml.model")
    match model:
        case "gpt2":
            return build_byte_level(metadata)
        case "llama":
            return build_llama(metadata)
    raise ImportFailed(
        f"{metadata.path}: unsupported tokenizer {model!r}; supported: gpt2 (byte-level BPE) and "
        "llama (SentencePiece)"
    )


def build_byte_level(metadata: Metadata) -> TokenizerParts:
    kind_name, kind = pre_tokenizer_kind(metadata)
    tokens = metadata.strings("tokenizer.ggml.tokens")
    vocabulary = index_tokens(metadata, tokens)
    check_alphabet(metadata, vocabulary)
    special = read_special_tokens(metadata, vocabulary, kind.add_bos)
    merges = read_merges(metadata, vocabulary)
    with refusing(f"{metadata.path}: tokenizer.ggml.tokens contradicts itself"):
        tokenizer = build_bpe(vocabulary, merges, kind)
        add_tokens(tokenizer, tokens, special.control_ids, special.user_ids)
    if tokenizer.get_vocab_size() != len(tokens):
        raise metadata.wrong("tokenizer.ggml.tokens", "tokens that all keep their ids")
    return special.parts(tokenizer, kind_name, len(tokens))


def build_llama(metadata: Metadata) -> TokenizerParts:
    """SentencePiece's BPE. Conversions write the user-defined pieces with plain spaces."""
    tokens = metadata.strings("tokenizer.ggml.tokens")
    special = read_special_tokens(metadata, index_tokens(metadata, tokens), add_bos_default=True)
    scores = read_scores(metadata, len(tokens))
    pieces = [
        Piece(text.replace(" ", SPACE) if code == USER_DEFINED else text, score, code)
        for text, score, code in zip(tokens, scores, special.types, strict=True)
    ]
    settings = SentencePieceSettings(
        kind=BPE_KIND,
        unk_id=metadata.integer("tokenizer.ggml.unknown_token_id", 0, len(tokens) - 1, default=0),
        prefix="always" if metadata.boolean("tokenizer.ggml.add_space_prefix", True) else "never",
        removes_extra_whitespace=metadata.boolean("tokenizer.ggml.remove_extra_whitespaces", False),
    )
    with refusing(f"{metadata.path}: tokenizer.ggml.tokens contradicts itself"):
        tokenizer = build_sentencepiece(pieces, settings, special.control_ids)
    if tokenizer.get_vocab_size() != len(tokens):
        raise metadata.wrong("tokenizer.ggml.tokens", "tokens that all keep their ids")
    return special.parts(tokenizer, "sentencepiece", len(tokens))


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """`types` are the codes of all tokens; `control_ids` are those that no text may become."""

    types: list[int]
    control_ids: set[int]
    user_ids: set[int]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool

    def parts(self, tokenizer: Tokenizer, kind: str, vocab_size: int) -> TokenizerParts:
        return TokenizerParts(
            json=tokenizer.to_str(),
            kind=kind,
            vocab_size=vocab_size,
            bos_token_id=self.bos_token_id,
            eos_token_ids=self.eos_token_ids,
            add_bos=self.add_bos,
        )


def read_special_tokens(
    metadata: Metadata, vocabulary: dict[str, int], add_bos_default: bool
) -> SpecialTokens:
    vocab_size = len(vocabulary)
    bos_token_id = read_bos(metadata, vocab_size)
    eos_token_ids = read_end_tokens(metadata, vocabulary)
    add_bos = metadata.boolean("tokenizer.ggml.add_bos_token", add_bos_default)
    if add_bos and bos_token_id is None:
        metadata.required("tokenizer.ggml.bos_token_id")
    types = read_token_types(metadata, vocab_size)
    control_ids = {id for id, code in enumerate(types) if code == CONTROL} | set(eos_token_ids)
    if bos_token_id is not None:
        control_ids.add(bos_token_id)
    user_ids = {id for id, code in enumerate(types) if code == USER_DEFINED} - control_ids
    return SpecialTokens(types, control_ids, user_ids, bos_token_id, eos_token_ids, add_bos)


def read_scores(metadata: Metadata, vocab_size: int) -> list[float]:
    key = "tokenizer.ggml.scores"
    value = metadata.required(key)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.shape == (vocab_size,):
        scores = value.astype(np.float32)
        if np.isfinite(scores).all():
            return [float(score) for score in scores]
    raise metadata.wrong(key, f"{vocab_size} finite numbers, one per token")


def pre_tokenizer_kind(metadata: Metadata) -> tuple[str, PreTokenizerKind]:
    name = metadata.optional_string("tokenizer.ggml.pre")
    if name is None or name not in PRE_TOKENIZERS:
        problem = "names no pre-tokenizer" if name is None else f"has the pre-tokenizer {name!r}"
        raise ImportFailed(
            f"{metadata.path} {problem} (tokenizer.ggml.pre); supported: "
            f"{', '.join(PRE_TOKENIZERS)}; use a conversion that names one of them"
        )
    return name, PRE_TOKENIZERS[name]


def index_tokens(metadata: Metadata, tokens: list[str]) -> dict[str, int]:
    """Token → id."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        again = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise ImportFailed(
            f"{metadata.path}: token {again!r} appears twice in tokenizer.ggml.tokens; "
            "use another conversion of the model"
        )
    return vocabulary


def check_alphabet(metadata: Metadata, vocabulary: dict[str, int]) -> None:
    """BPE drops a byte that is no token without a word, so plain text must be covered. Real
    vocabularies lack rare bytes: SmolLM2's has some control characters missing."""
    missing = [char for char in ESSENTIAL_CHARACTERS if char not in vocabulary]
    if missing:
        raise ImportFailed(
            f"{metadata.path}: tokenizer.ggml.tokens has no token for {missing[0]!r} and "
            f"{len(missing) - 1} other plain characters; use another conversion of the model"
        )


def read_token_types(metadata: Metadata, vocab_size: int) -> list[int]:
    """All normal when the file does not say (the key is optional)."""
    key = "tokenizer.ggml.token_type"
    if key not in metadata:
        return [NORMAL] * vocab_size
    types = metadata.integers(key)
    if len(types) != vocab_size:
        raise metadata.wrong(key, f"{vocab_size} entries, one per token, not {len(types)}")
    return types


def read_merges(metadata: Metadata, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for line in metadata.strings("tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise ImportFailed(
                f"{metadata.path}: the merge {line!r} in tokenizer.ggml.merges names tokens that "
                "do not exist; use another conversion of the model"
            )
        merges.append((left, right))
    return merges


def read_token_id(metadata: Metadata, key: str, vocab_size: int) -> int:
    return metadata.integer(key, 0, vocab_size - 1)


def read_bos(metadata: Metadata, vocab_size: int) -> int | None:
    key = "tokenizer.ggml.bos_token_id"
    return read_token_id(metadata, key, vocab_size) if key in metadata else None


def read_end_tokens(metadata: Metadata, vocabulary: dict[str, int]) -> tuple[int, ...]:
    """The union of every source: the ids that the file names and the well-known tokens."""
    named: list[int] = []
    for key in (f"tokenizer.ggml.{name}" for name in END_TOKEN_KEYS):
        if isinstance(metadata.values.get(key), np.ndarray):
            ids = metadata.integers(key)
            if not all(0 <= token_id < len(vocabulary) for token_id in ids):
                raise metadata.wrong(key, f"token ids from 0 to {len(vocabulary) - 1}")
            named += ids
        elif key in metadata:
            named.append(read_token_id(metadata, key, len(vocabulary)))
    return end_tokens(named, vocabulary)


def build_bpe(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], kind: PreTokenizerKind
) -> Tokenizer:
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=kind.ignore_merges))
    tokenizer.pre_tokenizer = build_pre_tokenizer(kind)
    tokenizer.decoder = decoders.ByteLevel()
    if kind.normalize_nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def build_pre_tokenizer(kind: PreTokenizerKind) -> PreTokenizer:
    steps: list[PreTokenizer] = []
    if kind.split_digits:
        steps.append(Digits(individual_digits=True))
    if kind.regex is not None:
        steps.append(Split(Regex(kind.regex), behavior="isolated"))
    steps.append(ByteLevel(add_prefix_space=False, use_regex=kind.regex is None))
    return pre_tokenizers.Sequence(steps)


def add_tokens(
    tokenizer: Tokenizer, tokens: list[str], special_ids: set[int], user_ids: set[int]
) -> None:
    tokenizer.add_special_tokens(
        [AddedToken(tokens[id], special=True, normalized=False) for id in sorted(special_ids)]
    )
    tokenizer.add_tokens(
        [AddedToken(tokens[id], special=False, normalized=False) for id in sorted(user_ids)]
    )
