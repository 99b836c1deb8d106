"""Reads a SentencePiece `tokenizer.model`: a protocol buffer with pieces, scores and settings.

Only the fields that decide how text is cut are read, by a reader of the wire format as small as
the job. The file is data of strangers: lengths are compared with what is left of it.
Source: `sentencepiece_model.proto` of SentencePiece (Kudo and Richardson 2018).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ImportFailed
from engine.importers.file_kind import check_regular_file

MAX_BYTES = 64 << 20
MAX_PIECES = 1 << 20
UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5

Field = int | bytes


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    score: float
    kind: int


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """`kind` is `UNIGRAM` or `BPE`; `charsmap` is the compiled normalization, empty for none.

    The special ids are -1 where there is no such token.
    """

    pieces: tuple[Piece, ...]
    kind: int
    unk_id: int
    bos_id: int
    eos_id: int
    charsmap: bytes
    adds_dummy_prefix: bool
    removes_extra_whitespace: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Raises ImportFailed that says what is wrong with the file."""
    if (num_bytes := check_regular_file(path)) > MAX_BYTES:
        raise ImportFailed(f"{path} has {num_bytes} bytes, more than such a file can need")
    try:
        return _parse(path.read_bytes())
    except OSError as exc:
        raise ImportFailed(f"{path} cannot be read: {exc}") from exc
    except _Damaged as exc:
        raise ImportFailed(
            f"{path} is not a SentencePiece model: {exc}; give a folder with a tokenizer.json"
        ) from exc


class _Damaged(Exception):
    """What is wrong with the bytes."""


def _parse(data: bytes) -> SentencePieceModel:
    pieces: list[Piece] = []
    trainer: dict[int, Field] = {}
    normalizer: dict[int, Field] = {}
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(_message(value)))
        elif number == 2:
            trainer |= dict(_fields(_message(value)))
        elif number == 3:
            normalizer |= dict(_fields(_message(value)))
        if len(pieces) > MAX_PIECES:
            raise _Damaged(f"it has more than {MAX_PIECES} pieces")
    kind = _integer(trainer, 3, UNIGRAM)
    if not pieces or kind not in (UNIGRAM, BPE):
        raise _Damaged(f"it has {len(pieces)} pieces of the model type {kind}")
    charsmap = normalizer.get(2, b"")
    return SentencePieceModel(
        pieces=tuple(pieces),
        kind=kind,
        unk_id=_integer(trainer, 40, 0),
        bos_id=_integer(trainer, 41, 1),
        eos_id=_integer(trainer, 42, 2),
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
        adds_dummy_prefix=bool(_integer(normalizer, 3, 1)),
        removes_extra_whitespace=bool(_integer(normalizer, 4, 1)),
    )


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    text, score = fields.get(1, b""), fields.get(2, b"\0\0\0\0")
    if not isinstance(text, bytes) or not isinstance(score, bytes) or len(score) != 4:
        raise _Damaged("a piece is described wrongly")
    try:
        return Piece(text.decode("utf-8"), struct.unpack("<f", score)[0], _integer(fields, 3, 1))
    except UnicodeDecodeError as exc:
        raise _Damaged("a piece is not UTF-8") from exc


def _message(value: Field) -> bytes:
    if not isinstance(value, bytes):
        raise _Damaged("a number stands where a message should")
    return value


def _integer(fields: dict[int, Field], number: int, default: int) -> int:
    """A 32-bit integer; negative ones are written as 64-bit two's complement."""
    value = fields.get(number, default)
    if not isinstance(value, int):
        raise _Damaged(f"its field {number} is no number")
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(data: bytes) -> Iterator[tuple[int, Field]]:
    """(field number, value) of a message, in order."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        value: Field
        if wire_type == _VARINT:
            value, position = _varint(data, position)
        elif wire_type in (_LENGTH, _FIXED32, _FIXED64):
            size = 4 if wire_type == _FIXED32 else 8
            if wire_type == _LENGTH:
                size, position = _varint(data, position)
            if size > len(data) - position:
                raise _Damaged("it is cut off")
            value, position = data[position : position + size], position + size
        else:
            raise _Damaged(f"it has a field of the unknown type {wire_type}")
        yield number, value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """(value, position behind it)."""
    value = 0
    for place in range(10):
        if position >= len(data):
            raise _Damaged("it is cut off")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, position
    raise _Damaged("it has a number of more than 64 bits")
