"""A tokenizer of single bytes with ChatML's control tokens, built with `tokenizers`.

Ids 0 to 255 are bytes in the order of their values; the control tokens follow.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from server.token_bytes import byte_level_alphabet
from server.tokenizer import Tokenizer

BOS, IM_START, IM_END = 256, 257, 258
VOCAB_SIZE = 259

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer_json(merges: tuple[tuple[str, str], ...] = ()) -> str:
    """`merges` make tokens of several bytes, with ids before those of the control tokens."""
    vocab = dict(byte_level_alphabet())
    vocab |= {left + right: len(vocab) + i for i, (left, right) in enumerate(merges)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    return str(tokenizer.to_str())


def byte_tokenizer(*, add_bos: bool = False) -> Tokenizer:
    return Tokenizer(byte_tokenizer_json(), bos_token_id=BOS, add_bos=add_bos)


def sentencepiece_tokenizer() -> Tokenizer:
    """Pieces with `▁` for spaces, `<0xAB>` for bytes, and a decoder as Llama 2 has it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁two", "▁", "▁spaces", "and", "▁a", "▁Hello"]
    description: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": text, "special": True, "single_word": False,
             "lstrip": False, "rstrip": False, "normalized": False}
            for i, text in enumerate(pieces[:3])
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False
        },
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True,
            "ignore_merges": False, "merges": [],
            "vocab": {text: i for i, text in enumerate(pieces)},
        },
    }  # fmt: skip
    return Tokenizer(json.dumps(description), bos_token_id=1, add_bos=True)
