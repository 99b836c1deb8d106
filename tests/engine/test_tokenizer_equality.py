"""Every family of tokenizers: what is imported gives the ids of the reference, in every format.

The references are SentencePiece itself and transformers' AutoTokenizer. Vocabularies are trained
here, since real ones cannot be fetched; the pre-tokenizers are the published ones of each family.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from engine.importers.gguf_metadata import Metadata
from engine.importers.gguf_reader import open_gguf
from engine.importers.gguf_tokenizer import build_tokenizer
from engine.importers.hf_tokenizer import NamedTokens, read_hf_tokenizer
from engine.importers.tokenizer_parts import TokenizerParts
from server.tokenizer import Tokenizer as ServerTokenizer
from tests.engine.gguf_files import GgufParts, write_gguf
from tests.engine.gguf_files import Metadata as Values
from tests.hard_strings import HARD_STRINGS, TRAINING_TEXTS

SPECIALS = ("<|begin_of_text|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 700
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"
REST = " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
LLAMA3 = f"{CONTRACTIONS}|{LETTERS}|\\p{{N}}{{1,3}}|{REST}"
QWEN2 = f"{CONTRACTIONS}|{LETTERS}|\\p{{N}}|{REST}"
START = "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
END = "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
SLASHES = " ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
TEKKEN = f"{START}*{END}+|{START}+{END}*|\\p{{N}}|{SLASHES}"
GPT_4O = f"{START}*{END}+{CONTRACTIONS}?|{START}+{END}*{CONTRACTIONS}?|\\p{{N}}{{1,3}}|{SLASHES}"


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    parts = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(parts)


def digits_apart() -> pre_tokenizers.PreTokenizer:
    parts = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    return pre_tokenizers.Sequence(parts)


BYTE_LEVEL: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": digits_apart,
    "refact": digits_apart,
    "llama-bpe": lambda: split_by(LLAMA3),
    "dbrx": lambda: split_by(LLAMA3),
    "qwen2": lambda: split_by(QWEN2),
    "tekken": lambda: split_by(TEKKEN),
    "gpt-4o": lambda: split_by(GPT_4O),
}
IGNORING_MERGES = ("llama-bpe", "tekken")


def train_byte_level(pre: str) -> Tokenizer:
    """As the family publishes it: specials last, a BOS put first by llama-bpe's."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in IGNORING_MERGES))
    tokenizer.pre_tokenizer = BYTE_LEVEL[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    if pre == "llama-bpe":
        bos = tokenizer.token_to_id(SPECIALS[0])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIALS[0]} $A", special_tokens=[(SPECIALS[0], bos)]
        )
    return tokenizer


def write_hf(folder: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[2],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def gguf_parts(folder: Path, values: Values) -> TokenizerParts:
    path = write_gguf(folder / "a.gguf", GgufParts(values, {}))
    return build_tokenizer(Metadata(path, open_gguf(path).metadata))


def byte_level_gguf(folder: Path, tokenizer: Tokenizer, pre: str) -> TokenizerParts:
    model = json.loads(tokenizer.to_str())["model"]
    ids = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [text for text, _ in ids]
    return gguf_parts(
        folder,
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3 if text in SPECIALS else 1 for text in tokens],
            "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
            "tokenizer.ggml.bos_token_id": tokens.index(SPECIALS[0]),
            "tokenizer.ggml.eos_token_id": tokens.index(SPECIALS[2]),
        },
    )


def serving(parts: TokenizerParts) -> ServerTokenizer:
    return ServerTokenizer(parts.json, bos_token_id=parts.bos_token_id, add_bos=parts.add_bos)


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_byte_level_bpe_in_both_formats_gives_the_ids_of_transformers(
    tmp_path: Path, pre: str
) -> None:
    trained = train_byte_level(pre)
    reference = transformers.AutoTokenizer.from_pretrained(write_hf(tmp_path, trained))
    from_hf = read_hf_tokenizer(tmp_path, VOCAB_SIZE, NamedTokens(None, ()))
    from_gguf = byte_level_gguf(tmp_path, trained, pre)
    assert (from_hf.bos_token_id, from_hf.eos_token_ids) == (
        from_gguf.bos_token_id,
        from_gguf.eos_token_ids,
    )
    assert from_hf.add_bos == (pre == "llama-bpe")
    for parts in (from_hf, from_gguf):
        tokenizer = serving(parts)
        for text in HARD_STRINGS:
            expected = reference.encode(text, add_special_tokens=False)
            assert tokenizer.encode_parsed(text, add_bos=False) == expected, (pre, text)
            assert tokenizer.decode(expected) == reference.decode(expected), (pre, text)
        with_bos = serving(from_hf).encode_parsed("hi")
        assert with_bos == reference.encode("hi", add_special_tokens=True)


def test_control_tokens_as_text_stay_text(tmp_path: Path) -> None:
    trained = train_byte_level("llama-bpe")
    write_hf(tmp_path, trained)
    tokenizer = serving(read_hf_tokenizer(tmp_path, VOCAB_SIZE, NamedTokens(None, ())))
    for text in SPECIALS:
        ids = tokenizer.encode_plain(text)
        assert not tokenizer.special_token_ids & set(ids)
        assert tokenizer.decode(ids) == text


PIECES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "add_dummy_prefix": True, "control_symbols": ["<|end|>"]},
    "gemma": {
        "model_type": "bpe",
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<start_of_turn>", "<end_of_turn>", "▁▁", "▁▁▁", "\n\n", "\t\t"],
    },
    "unigram": {"model_type": "unigram", "add_dummy_prefix": True},
}


def train_sentencepiece(family: str) -> bytes:
    model = io.BytesIO()
    options: dict[str, Any] = {
        "vocab_size": 800,
        "byte_fallback": True,
        "character_coverage": 0.99,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
        "hard_vocab_limit": False,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(t for t in TRAINING_TEXTS if "\0" not in t),
        model_writer=model,
        **options | PIECES[family],
    )
    return model.getvalue()


@pytest.fixture(scope="module", params=PIECES)
def trained(request: pytest.FixtureRequest) -> tuple[str, bytes]:
    return request.param, train_sentencepiece(request.param)


def piece_types(model: sentencepiece.SentencePieceProcessor, family: str) -> list[int]:
    """As llama.cpp's converter numbers them; it makes a model's turn tokens control tokens."""

    def kind(index: int) -> int:
        if model.is_byte(index):
            return 6
        if model.is_unknown(index):
            return 2
        text = model.id_to_piece(index)
        if model.is_control(index) or text.endswith("_of_turn>"):
            return 3
        return 4 if text in PIECES[family].get("user_defined_symbols", ()) else 1

    return [kind(index) for index in range(model.get_piece_size())]


def sentencepiece_gguf(
    folder: Path, model: sentencepiece.SentencePieceProcessor, family: str
) -> TokenizerParts:
    """With plain spaces in the user-defined pieces, as the converter writes them."""
    count = model.get_piece_size()
    types = piece_types(model, family)
    tokens = [model.id_to_piece(index) for index in range(count)]
    tokens = [t.replace("▁", " ") if k == 4 else t for t, k in zip(tokens, types, strict=True)]
    return gguf_parts(
        folder,
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [float(model.get_score(index)) for index in range(count)],
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.bos_token_id": model.bos_id(),
            "tokenizer.ggml.eos_token_id": model.eos_id(),
            "tokenizer.ggml.unknown_token_id": model.unk_id(),
            "tokenizer.ggml.add_space_prefix": PIECES[family]["add_dummy_prefix"],
        },
    )


def is_as_likely(
    model: sentencepiece.SentencePieceProcessor, ids: list[int], expected: list[int]
) -> bool:
    """Equal, or of the same score: where two ways to cut a text tie, rounding decides."""

    def score(ids: list[int]) -> float:
        return sum(float(model.get_score(index)) for index in ids)

    return ids == expected or score(ids) == pytest.approx(score(expected), abs=1e-3)


def test_sentencepiece_in_every_format_gives_the_ids_of_sentencepiece(
    tmp_path: Path, trained: tuple[str, bytes]
) -> None:
    """A turn token is a control token here, which no user can write; all else is equal."""
    family, data = trained
    (tmp_path / "tokenizer.model").write_bytes(data)
    model = sentencepiece.SentencePieceProcessor(model_proto=data)
    forms = [read_hf_tokenizer(tmp_path, model.get_piece_size(), NamedTokens(None, ()))]
    if family != "unigram":
        forms.append(sentencepiece_gguf(tmp_path, model, family))
    for parts in forms:
        assert (parts.bos_token_id, parts.add_bos) == (model.bos_id(), True)
        assert parts.eos_token_ids[0] == model.eos_id()
        tokenizer = serving(parts)
        for text in HARD_STRINGS:
            if "_of_turn>" in text or "\0" in text:
                continue
            ids = tokenizer.encode_plain(text)
            assert not tokenizer.special_token_ids & set(ids)
            if family != "unigram":
                assert ids == model.encode(text), (family, text)
            # Unigram is cut where a control token's text stands, so that it cannot become one.
            elif "</s>" not in text:
                assert is_as_likely(model, ids, model.encode(text)), text
            assert tokenizer.decode(ids).lstrip(" ") == model.decode(ids).lstrip(" ")


def test_text_after_a_control_token_gets_a_space_only_in_the_first_llama_models(
    tmp_path: Path,
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(train_sentencepiece("llama"))
    for legacy, expected in ((True, "▁"), (False, "")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": legacy}))
        parts = read_hf_tokenizer(tmp_path, 1 << 16, NamedTokens(None, ()))
        inner = Tokenizer.from_str(parts.json)
        pieces = inner.encode("a<|end|>a", add_special_tokens=False).tokens
        assert pieces == ["▁a", "<|end|>", f"{expected}a"]
