"""An embedding model without weights: a WordPiece tokenizer and an engine that counts.

The vector of a text is its length and its ids as numbers, made to have length 1, so that every
answer can be computed by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

from engine.architectures.encoder import EncoderConfig
from engine.device_board import DeviceReport
from scheduler.messages import (
    EmbedRequest,
    EmbedResult,
    EmbedStep,
    EngineReady,
    Shutdown,
    StepStats,
)
from server.app import create_app
from server.encoder_tokenizer import EncoderTokenizer
from server.engine_state import EngineState
from server.http_settings import HttpSettings
from server.model_registry import ServedModels
from server.served_embedder import Float32Array, ServedEmbedder
from tests.server.engine_scripts import INFO
from tests.server.scripted_client import FakeEngine, saying, served

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d")
CLS, SEP, A, B, C, D = 2, 3, 4, 5, 6, 7
CONFIG = EncoderConfig(
    architecture="bert",
    num_layers=1,
    hidden_size=4,
    intermediate_size=4,
    num_heads=1,
    vocab_size=len(WORDS),
    context_length=16,
    layer_norm_eps=1e-12,
    activation="gelu",
    pooling="mean",
)


def word_tokenizer() -> EncoderTokenizer:
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(word) for word in WORDS[:4]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    tokenizer.enable_padding()
    tokenizer.enable_truncation(3)
    return EncoderTokenizer(tokenizer.to_str())


def vectors_of(inputs: Sequence[Sequence[int]]) -> Float32Array:
    """[N, 4]: how often each of a, b and c is in the text, and the text's length; at length 1."""
    rows = [[*(list(ids).count(word) for word in (A, B, C)), len(ids)] for ids in inputs]
    counts = np.array(rows, np.float32)
    result: Float32Array = counts / np.linalg.norm(counts, axis=1, keepdims=True)
    return result


class FakeEmbeddingEngine:
    """Answers at once, or raises `failure`; with `gate`, when that is set. `gives_logits`: of a
    pair, how often a and b are in it."""

    def __init__(self, *, gives_logits: bool = False) -> None:
        self.gives_logits = gives_logits
        self.info = INFO
        self.devices: DeviceReport | None = None
        self.state = EngineState.READY
        self.state_detail = ""
        self.stats = StepStats()
        self.failure: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.requests: list[EmbedRequest] = []
        self.num_cancelled = 0

    async def embed(self, request: EmbedRequest) -> Float32Array:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.gives_logits:
            counts = [[ids.count(A) + ids.count(B)] for ids in request.inputs]
            return np.array(counts, np.float32)
        return vectors_of(request.inputs)


def embedder(engine: FakeEmbeddingEngine | None = None, **changes: Any) -> ServedEmbedder:
    values: dict[str, Any] = {
        "name": "counts",
        "engine": engine or FakeEmbeddingEngine(),
        "tokenizer": word_tokenizer(),
        "config": CONFIG,
        "max_model_len": 16,
        "created": 1_700_000_000,
        "quantization": "f32",
        "aliases": ("text-embedding-3-small",),
    }
    return ServedEmbedder(**(values | changes))


def cross_encoder(engine: FakeEmbeddingEngine | None = None) -> ServedEmbedder:
    return embedder(
        engine or FakeEmbeddingEngine(gives_logits=True),
        name="pairs",
        config=replace(CONFIG, pair_separator=SEP),
        aliases=(),
    )


def app_with_both(
    engine: FakeEmbeddingEngine | None = None, settings: HttpSettings | None = None
) -> FastAPI:
    """A model that writes, called "writer", and an embedding model."""
    writer = served(FakeEngine(saying("hi")), name="writer")
    return create_app(ServedModels(writer, embedder(engine)), settings)


def counting_engine(connection: Any, die_after: int | None = None, per_batch: int = 2) -> None:
    """An engine that computes `per_batch` texts a step; it ends after `die_after` steps."""
    connection.send(EngineReady(INFO))
    pending: list[tuple[str, int, tuple[int, ...]]] = []
    num_steps = 0
    while die_after is None or num_steps < die_after:
        while not pending:
            message = connection.recv()
            if isinstance(message, Shutdown):
                return
            if isinstance(message, EmbedRequest):
                pending += [(message.request_id, i, ids) for i, ids in enumerate(message.inputs)]
        batch, pending = pending[:per_batch], pending[per_batch:]
        results = tuple(
            EmbedResult(request_id, (index,), vectors_of([ids]).tobytes())
            for request_id, index, ids in batch
        )
        connection.send(EmbedStep(results, StepStats(total_steps=num_steps)))
        num_steps += 1
