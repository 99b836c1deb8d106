"""Runs texts through models as the engine does, and compares what they predict.

The reference runs first and leaves its logits in a file; then one candidate after another is
loaded, so that only one model is in memory at a time. Knows token ids, not text.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from engine.batch import Batch, Float32Array, Int32Array
from engine.bundle import Bundle
from engine.errors import BundleError
from engine.evaluate.divergence import Divergence, TextScore, log_softmax
from engine.float_forward import FloatForward
from engine.importers.checkpoint import Checkpoint
from engine.kv_format import BLOCK_SIZE, KV_FORMATS
from engine.loader import EngineConfig, load_engine

ROWS_PER_STEP = 64
_ALL_MEMORY_BYTES = 1 << 50
"""The pages take what one text needs, whatever that is."""

Place = tuple[tuple[int, slice], Float32Array]
"""(text, positions in it) and the logits [R, V] there."""

OnRows = Callable[[str, int, int], None]
"""(label of what runs, tokens done, tokens in all)"""


class Scored(Protocol):
    """Something that predicts the next token of every token."""

    @property
    def label(self) -> str: ...

    @property
    def weight_format(self) -> str: ...

    @property
    def kv_format(self) -> str: ...

    @property
    def num_weight_bytes(self) -> int: ...

    @property
    def kv_bytes_per_token(self) -> int: ...

    def logits(self, token_ids: Int32Array, num_threads: int) -> Iterator[Float32Array]:
        """`token_ids` [S, T]: S texts, each from its beginning. Yields `ROWS_PER_STEP` rows [R, V]
        of one text at a time (fewer at its end), valid until the next."""
        ...


@dataclass(frozen=True, slots=True)
class ScoredBundle:
    """A bundle with a format for its keys and values. `kv_format` is a name of `KV_FORMATS`."""

    label: str
    bundle: Bundle
    kv_format: str

    @property
    def weight_format(self) -> str:
        return self.bundle.weight_format

    @property
    def num_weight_bytes(self) -> int:
        return self.bundle.weights_path.stat().st_size

    @property
    def kv_bytes_per_token(self) -> int:
        c = self.bundle.config
        kv_format = KV_FORMATS[self.kv_format]
        return kv_format.bytes_per_token(c.num_layers, c.num_kv_heads, c.head_size)

    def logits(self, token_ids: Int32Array, num_threads: int) -> Iterator[Float32Array]:
        length = token_ids.shape[1]
        engine = EngineConfig(
            bundle=self.bundle.path,
            device="cpu",
            num_threads=num_threads,
            kv_memory_bytes=_ALL_MEMORY_BYTES,
            kv_format=self.kv_format,
            max_model_len=max(length, BLOCK_SIZE),
            max_num_seqs=1,
            max_num_batched_tokens=ROWS_PER_STEP,
            max_logits_rows=ROWS_PER_STEP,
        )
        runner = load_engine(engine, lambda phase: None).runner
        for text in token_ids:
            for start in range(0, length, ROWS_PER_STEP):
                yield runner.execute(_chunk(text, start))


@dataclass(frozen=True, slots=True)
class ScoredCheckpoint:
    """A model file in float32, keys and values too: the reference for everything else."""

    label: str
    checkpoint: Checkpoint
    num_parameters: int

    weight_format = "f32"
    kv_format = "f32"

    @property
    def num_weight_bytes(self) -> int:
        return 4 * self.num_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        c = self.checkpoint.config
        return KV_FORMATS["f32"].bytes_per_token(c.num_layers, c.num_kv_heads, c.head_size)

    def logits(self, token_ids: Int32Array, num_threads: int) -> Iterator[Float32Array]:
        forward = FloatForward(self.checkpoint, token_ids, num_threads)
        before, hidden = forward.first(), None
        for layer in range(self.checkpoint.config.num_layers):
            attention = forward.attention(layer, before.qkv)
            result = forward.rest(layer, before.hidden, attention)
            hidden, before = result.hidden, result.following or before
        assert hidden is not None, "a model has layers"
        yield from forward.logits(hidden, ROWS_PER_STEP)


@dataclass(frozen=True, slots=True)
class Figures:
    """How one model did. The divergence is None for the reference itself."""

    label: str
    weight_format: str
    kv_format: str
    num_weight_bytes: int
    kv_bytes_per_token: int
    score: TextScore
    divergence: Divergence | None


def compare(
    reference: Scored,
    candidates: Sequence[Scored],
    token_ids: Int32Array,
    num_threads: int,
    on_rows: OnRows,
) -> tuple[Figures, ...]:
    """The reference's figures, then the candidates'. `token_ids` [S, T] are S texts.

    Raises what loading a bundle raises, and BundleError when the vocabularies differ.
    """
    with tempfile.TemporaryDirectory(prefix="hexlm-eval-") as folder:
        kept = Path(folder) / "logits.bin"
        with kept.open("wb") as file:
            score, vocab_size = TextScore(), 0
            for place, logits in _places(reference, token_ids, num_threads, on_rows):
                score.add(log_softmax(logits), _following(token_ids, place))
                file.write(np.ascontiguousarray(logits, np.float32).data)
                vocab_size = logits.shape[1]
        figures = [_figures(reference, score, None)]
        for candidate in candidates:
            with kept.open("rb") as file:
                places = _places(candidate, token_ids, num_threads, on_rows)
                figures.append(_diverging(candidate, places, file, vocab_size, token_ids))
    return tuple(figures)


def _diverging(
    candidate: Scored,
    places: Iterator[Place],
    kept: BinaryIO,
    vocab_size: int,
    token_ids: Int32Array,
) -> Figures:
    """`kept` holds the reference's logits in the order of the places."""
    score, divergence = TextScore(), Divergence()
    for place, logits in places:
        if logits.shape[1] != vocab_size:
            raise BundleError(
                f"{candidate.label} has a vocabulary of {logits.shape[1]}, the reference one of "
                f"{vocab_size}; compare models of one vocabulary"
            )
        reference = np.frombuffer(kept.read(logits.nbytes), np.float32).reshape(logits.shape)
        logprobs = log_softmax(logits)
        score.add(logprobs, _following(token_ids, place))
        divergence.add(log_softmax(reference), logprobs)
    return _figures(candidate, score, divergence)


def _figures(model: Scored, score: TextScore, divergence: Divergence | None) -> Figures:
    return Figures(
        model.label,
        model.weight_format,
        model.kv_format,
        model.num_weight_bytes,
        model.kv_bytes_per_token,
        score,
        divergence,
    )


def _places(
    model: Scored, token_ids: Int32Array, num_threads: int, on_rows: OnRows
) -> Iterator[Place]:
    """Each chunk of logits with its text and the positions in it."""
    num_texts, length = token_ids.shape
    chunks = model.logits(token_ids, num_threads)
    for text in range(num_texts):
        for start in range(0, length, ROWS_PER_STEP):
            end = min(start + ROWS_PER_STEP, length)
            yield (text, slice(start, end)), next(chunks)
            on_rows(model.label, text * length + end, token_ids.size)


def _following(token_ids: Int32Array, place: tuple[int, slice]) -> Int32Array:
    """The tokens that come after those of a chunk; the last of a text has none."""
    text, positions = place
    return token_ids[text, positions.start + 1 : positions.stop + 1]


def _chunk(text: Int32Array, start: int) -> Batch:
    """Tokens from `start` on of the only sequence there is."""
    end = min(start + ROWS_PER_STEP, len(text))
    positions = np.arange(start, end, dtype=np.int32)
    return Batch(
        token_ids=np.ascontiguousarray(text[start:end]),
        positions=positions,
        slot_mapping=positions,
        query_starts=np.array([0, end - start], np.int32),
        context_lens=np.array([end], np.int32),
        block_tables=np.arange(-(-len(text) // BLOCK_SIZE), dtype=np.int32)[None],
        logits_rows=np.arange(end - start, dtype=np.int32),
    )
