"""Builds a `tokenizers` tokenizer that cuts text as SentencePiece does (BPE and Unigram).

Pieces come from a `tokenizer.model` or from a GGUF that was made of one. What SentencePiece does
and the library does not: only normal pieces are merged (here: only they get merges, so that text
that looks like a control token never becomes one), and user-defined pieces are always whole
(here: added tokens). Knows no file format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.decoders import Decoder
from tokenizers.models import BPE, Unigram
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from engine.importers.sentencepiece_model import (
    BYTE,
    CONTROL,
    NORMAL,
    UNIGRAM,
    USER_DEFINED,
    Piece,
)

SPACE = "▁"
NUM_BYTES = 256
USER_DEFINED_SCORE = -0.1
"""What SentencePiece's Unigram gives them, better than any normal piece."""


@dataclass(frozen=True, slots=True)
class SentencePieceSettings:
    """`prefix`: where a space is put before the text: `never`, `first` (of the whole text) or
    `always` (also after every control token, as the first Llama models were trained)."""

    kind: int
    unk_id: int
    prefix: str = "always"
    charsmap: bytes = b""
    removes_extra_whitespace: bool = False


def build_sentencepiece(
    pieces: Sequence[Piece], settings: SentencePieceSettings, special_ids: set[int]
) -> Tokenizer:
    """`special_ids` become control tokens, other user-defined pieces whole words.

    Ids are the pieces' places. Raises ValueError for pieces that contradict themselves.
    """
    texts = [piece.text for piece in pieces]
    if len(set(texts)) != len(texts):
        raise ValueError("a piece appears twice")
    tokenizer = Tokenizer(_model(pieces, settings))
    tokenizer.normalizer = normalizers.Sequence(_normalizers(settings))
    if steps := _pre_tokenizers(pieces, settings):
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(_decoders(settings))
    _add_tokens(tokenizer, pieces, special_ids, settings)
    return tokenizer


def _model(pieces: Sequence[Piece], settings: SentencePieceSettings) -> BPE | Unigram:
    num_bytes = sum(piece.kind == BYTE for piece in pieces)
    has_bytes = num_bytes == NUM_BYTES
    unk_id = settings.unk_id if 0 <= settings.unk_id < len(pieces) else None
    if settings.kind == UNIGRAM:
        return Unigram(_unigram_scores(pieces), unk_id=unk_id, byte_fallback=has_bytes)
    vocabulary = {piece.text: index for index, piece in enumerate(pieces)}
    unk = None if unk_id is None else pieces[unk_id].text
    return BPE(vocabulary, _merges(pieces), unk_token=unk, fuse_unk=True, byte_fallback=has_bytes)


def _merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Every way to put a piece together, the best score first: SentencePiece merges whichever
    neighbours make the best piece."""
    normal = {
        piece.text: (-piece.score, index)
        for index, piece in enumerate(pieces)
        if piece.kind == NORMAL
    }
    ranked = [
        (rank, text[:cut], text[cut:])
        for text, rank in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]
    ranked.sort()
    return [(left, right) for _, left, right in ranked]


def _unigram_scores(pieces: Sequence[Piece]) -> list[tuple[str, float]]:
    """User-defined pieces win over whatever else the same text could become."""
    worst = min((piece.score for piece in pieces if piece.kind == NORMAL), default=0.0)

    def score(piece: Piece) -> float:
        if piece.kind == USER_DEFINED:
            return USER_DEFINED_SCORE
        return piece.score if piece.kind == NORMAL else worst

    return [(piece.text, score(piece)) for piece in pieces]


def _pre_tokenizers(pieces: Sequence[Piece], settings: SentencePieceSettings) -> list[PreTokenizer]:
    steps: list[PreTokenizer] = []
    if settings.prefix == "first":
        steps.append(
            pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
        )
    if settings.kind == UNIGRAM:
        # The library's Unigram finds any piece in the text. Cut after their first character, those
        # that no text may become are not there to be found.
        texts = [p.text for p in pieces if p.kind not in (NORMAL, USER_DEFINED) and len(p.text) > 1]
        cuts = "|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in texts)
        steps.append(pre_tokenizers.Split(Regex(cuts), behavior="merged_with_previous"))
    return steps


def _normalizers(settings: SentencePieceSettings) -> list[Normalizer]:
    steps: list[Normalizer] = []
    if settings.charsmap:
        steps.append(normalizers.Precompiled(settings.charsmap))
    if settings.removes_extra_whitespace:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if settings.prefix == "always":
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return steps


def _decoders(settings: SentencePieceSettings) -> list[Decoder]:
    steps: list[Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if settings.prefix != "never":
        steps.append(decoders.Strip(content=" ", left=1))
    return steps


def _add_tokens(
    tokenizer: Tokenizer,
    pieces: Sequence[Piece],
    special_ids: set[int],
    settings: SentencePieceSettings,
) -> None:
    """User-defined pieces are sought in the text as SentencePiece sees it, with its space marks.
    Where every stretch of text gets a space of its own they would get one too, so there they are
    sought in the text as it is."""
    special = special_ids | {i for i, piece in enumerate(pieces) if piece.kind == CONTROL}
    user = {i for i, piece in enumerate(pieces) if piece.kind == USER_DEFINED} - special
    if settings.kind == UNIGRAM:
        user = set()  # their scores see to it
    is_normalized = settings.prefix != "always"
    tokenizer.add_special_tokens(
        [AddedToken(pieces[i].text, special=True, normalized=False) for i in sorted(special)]
    )
    tokenizer.add_tokens(
        [AddedToken(pieces[i].text, special=False, normalized=is_normalized) for i in sorted(user)]
    )
