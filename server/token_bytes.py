"""The bytes that each token stands for, read out of a tokenizer's own description.

Three families: byte-level BPE (every character of a token is one byte, in GPT-2's printable
alphabet), SentencePiece style (`▁` is a space, `<0xAB>` is a byte) and plain text. Added tokens
are literal text in all of them. Knows nothing of decoding a stream (`detokenizer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"


@cache
def byte_level_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE (Radford et al. 2019, `bytes_to_unicode`).

    Printable Latin-1 bytes stand for themselves, the other 68 are U+0100, U+0101, ... in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def decoder_parts(description: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The decoder of a tokenizer.json, flattened out of its `Sequence`s."""
    pending = [description.get("decoder")]
    while pending:
        part = pending.pop(0)
        if isinstance(part, dict):
            pending = [*part.get("decoders", []), *pending]
            yield part


def token_decoder(description: dict[str, Any]) -> Callable[[str], bytes]:
    """The function from a token's text (not an added token's) to its bytes.

    Raises ValueError for a decoder whose tokens do not join bytewise (WordPiece, CTC).
    """
    kinds = {part.get("type") for part in decoder_parts(description)}
    if kinds & {"WordPiece", "CTC", "BPEDecoder"}:
        raise ValueError(f"tokenizer decoder {sorted(map(str, kinds))} is not supported")
    if "ByteLevel" in kinds:
        return _decode_byte_level
    marks_spaces = "Metaspace" in kinds or _replaces_space_mark(description)
    has_byte_tokens = "ByteFallback" in kinds
    return lambda text: _decode_sentencepiece(text, marks_spaces, has_byte_tokens)


def added_token_decoder(description: dict[str, Any]) -> Callable[[str], bytes]:
    """The function from an added token's text to its bytes: literal, but for the space marks that
    SentencePiece's own user-defined pieces are written with."""
    if _replaces_space_mark(description):
        return lambda text: text.replace(_SPACE_MARK, " ").encode()
    return str.encode


def strips_leading_space(description: dict[str, Any]) -> bool:
    """Whether a full decode drops the one space at the very start of a text."""
    for part in decoder_parts(description):
        if part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return True
        if part.get("type") == "Strip" and part.get("content") == " " and part.get("start"):
            return True
    return False


def _replaces_space_mark(description: dict[str, Any]) -> bool:
    return any(
        part.get("type") == "Replace" and part.get("pattern") == {"String": _SPACE_MARK}
        for part in decoder_parts(description)
    )


def _decode_byte_level(text: str) -> bytes:
    alphabet = byte_level_alphabet()
    try:
        return bytes([alphabet[character] for character in text])
    except KeyError:
        # Not of the alphabet: a token that was added to the vocabulary as literal text.
        return text.encode()


def _decode_sentencepiece(text: str, marks_spaces: bool, has_byte_tokens: bool) -> bytes:
    match = _BYTE_TOKEN.fullmatch(text) if has_byte_tokens else None
    if match:
        return bytes([int(match[1], 16)])
    return (text.replace(_SPACE_MARK, " ") if marks_spaces else text).encode()
