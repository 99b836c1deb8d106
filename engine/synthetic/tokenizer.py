"""A tokenizer of any size for models that know nothing: bytes, and words that nothing encodes to.

Text becomes one token a byte; the other tokens are there to be drawn by a random model, and read
as words of four letters or more. Knows the format of tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count, islice, product
from string import ascii_lowercase

END_OF_TEXT = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_NUM_BYTES = 256


def synthetic_tokenizer(vocab_size: int) -> str:
    """tokenizer.json with bytes first, `END_OF_TEXT` last and words between.

    `vocab_size` must be at least 257.
    """
    words = islice(_words(), vocab_size - _NUM_BYTES - 1)
    vocab = {token: index for index, token in enumerate([*_byte_letters(), *words])}
    end = vocab_size - 1
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    document: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": end,
                "content": END_OF_TEXT,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {**vocab, END_OF_TEXT: end},
            "merges": [],
        },
    }
    return json.dumps(document)


def _words() -> Iterator[str]:
    """With a space in front, as most tokens of a vocabulary have one."""
    for length in count(4):
        for letters in product(ascii_lowercase, repeat=length - 1):
            yield "Ġ" + "".join(letters)


def _byte_letters() -> list[str]:
    """GPT-2's printable character for each byte (Radford et al. 2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(0x100)
    return [chr(byte if byte in printable else next(others)) for byte in range(_NUM_BYTES)]
