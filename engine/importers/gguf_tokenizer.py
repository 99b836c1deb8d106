"""Builds a `tokenizer.json` and the set of end tokens from a GGUF's metadata.

Byte-level BPE only. Which regex splits the text before BPE decides how digits and contractions
become tokens, so the pre-tokenizer must be one of a known list: an unknown one is an error, not
a guess. Knows nothing about chat templates; BOS is a policy of the caller, not of this file.
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

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

END_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

# End-of-turn tokens of well-known chat formats. Many conversions name only one of a model's
# end tokens (TK-07): a model that stops nowhere answers itself.
KNOWN_END_TOKENS = frozenset(
    {
        "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
        "<|eot|>", "<end_of_turn>", "<|endofturn|>", "<|end_of_turn|>", "<end_of_utterance>",
        "<EOT>", "<|return|>", "<｜end▁of▁sentence｜>",
    }
)  # fmt: skip

# Printable ASCII, and space and newline as GPT-2's alphabet writes them.
ESSENTIAL_CHARACTERS = "".join(map(chr, range(0x21, 0x7F))) + "ĠĊ"

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


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
        "smollm": PreTokenizerKind(split_digits=True),
        "llama-bpe": PreTokenizerKind(
            regex=rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{PUNCTUATION_AND_SPACE}",
            ignore_merges=True,
            add_bos=True,
        ),
        "qwen2": PreTokenizerKind(
            regex=rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{PUNCTUATION_AND_SPACE}",
            normalize_nfc=True,
        ),
    }
)


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """`json` is the text of a tokenizer.json. It adds no BOS by itself: `add_bos` says whether
    the model wants one."""

    json: str
    kind: str
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool


def build_tokenizer(metadata: Metadata) -> TokenizerParts:
    """Raises ImportFailed for anything but byte-level BPE with a known pre-tokenizer, and for
    vocabularies that contradict themselves."""
    kind_name, kind = pre_tokenizer_kind(metadata)
    tokens = metadata.strings("tokenizer.ggml.tokens")
    vocabulary = index_tokens(metadata, tokens)
    bos_token_id = read_bos(metadata, len(tokens))
    eos_token_ids = read_end_tokens(metadata, vocabulary)
    add_bos = metadata.boolean("tokenizer.ggml.add_bos_token", kind.add_bos)
    if add_bos and bos_token_id is None:
        metadata.required("tokenizer.ggml.bos_token_id")
    token_types = read_token_types(metadata, len(tokens))
    special_ids = {id for id, code in enumerate(token_types) if code == CONTROL}
    special_ids |= set(eos_token_ids) | ({bos_token_id} if bos_token_id is not None else set())
    user_ids = {id for id, code in enumerate(token_types) if code == USER_DEFINED} - special_ids
    tokenizer = build_bpe(vocabulary, read_merges(metadata, vocabulary), kind)
    add_tokens(tokenizer, tokens, special_ids, user_ids)
    if tokenizer.get_vocab_size() != len(tokens):
        raise metadata.wrong("tokenizer.ggml.tokens", "tokens that all keep their ids")
    return TokenizerParts(
        tokenizer.to_str(), kind_name, len(tokens), bos_token_id, eos_token_ids, add_bos
    )


def pre_tokenizer_kind(metadata: Metadata) -> tuple[str, PreTokenizerKind]:
    model = metadata.string("tokenizer.ggml.model")
    if model != "gpt2":
        raise ImportFailed(
            f"{metadata.path}: unsupported tokenizer {model!r}; supported: gpt2 (byte-level BPE)"
        )
    name = metadata.optional_string("tokenizer.ggml.pre")
    if name is None or name not in PRE_TOKENIZERS:
        problem = "names no pre-tokenizer" if name is None else f"has the pre-tokenizer {name!r}"
        raise ImportFailed(
            f"{metadata.path} {problem} (tokenizer.ggml.pre); supported: "
            f"{', '.join(PRE_TOKENIZERS)}; use a conversion that names one of them"
        )
    return name, PRE_TOKENIZERS[name]


def index_tokens(metadata: Metadata, tokens: list[str]) -> dict[str, int]:
    """Token → id. BPE drops a byte that is no token without a word, so plain text must be
    covered. Real vocabularies lack rare bytes: SmolLM2's has some control characters missing."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        again = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise ImportFailed(
            f"{metadata.path}: token {again!r} appears twice in tokenizer.ggml.tokens; "
            "use another conversion of the model"
        )
    missing = [char for char in ESSENTIAL_CHARACTERS if char not in vocabulary]
    if missing:
        raise ImportFailed(
            f"{metadata.path}: tokenizer.ggml.tokens has no token for {missing[0]!r} and "
            f"{len(missing) - 1} other plain characters; use another conversion of the model"
        )
    return vocabulary


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
    end_tokens = {vocabulary[token] for token in KNOWN_END_TOKENS if token in vocabulary}
    for key in (f"tokenizer.ggml.{name}" for name in END_TOKEN_KEYS):
        if isinstance(metadata.values.get(key), np.ndarray):
            ids = metadata.integers(key)
            if not all(0 <= token_id < len(vocabulary) for token_id in ids):
                raise metadata.wrong(key, f"token ids from 0 to {len(vocabulary) - 1}")
            end_tokens.update(ids)
        elif key in metadata:
            end_tokens.add(read_token_id(metadata, key, len(vocabulary)))
    return tuple(sorted(end_tokens))


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
