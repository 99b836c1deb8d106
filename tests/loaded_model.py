"""A bundle put together as the loader does it, with every part within a test's reach.

And what a test may do to the pages: fill them with garbage, so that whatever is read without
having been written shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.architectures.config import ModelConfig
from engine.attention import Attention, NumpyAttention
from engine.batch import Float32Array, Int32Array
from engine.bundle import Bundle
from engine.embedding import Embedding
from engine.export.model import INDEX_FILE
from engine.export.weights_file import StoredMatrix, read_matrix
from engine.grammar_matcher import GrammarFactory
from engine.kernel_runner import KernelRunner
from engine.kernels.attention_kernel import KernelAttention
from engine.kv_cache import PagedKVCache
from engine.kv_format import KV_FORMATS
from engine.lane import CpuLane
from engine.loader import open_grammars
from engine.model_runner import ModelRunner
from engine.panel_weights import PanelWeights, has_panels
from engine.sampler import Sampler
from engine.step_form import StepForm
from tests.batches import Span, make_batch


@dataclass(frozen=True)
class LoadedModel:
    config: ModelConfig
    lane: CpuLane
    attention: Attention
    cache: PagedKVCache
    runner: StepForm
    sampler: Sampler
    grammars: GrammarFactory

    def logits(self, *spans: Span) -> Float32Array:
        """A copy of the logits of every token of a step."""
        return self.runner.execute(make_batch(spans, self.cache.num_blocks - 1)).copy()

    def logits_of(
        self, token_ids: Sequence[int], table: Sequence[int], chunks: Sequence[int] = (1_000_000,)
    ) -> Float32Array:
        """Logits of a whole sequence, computed in chunks; the last size is used to the end."""
        parts: list[Float32Array] = []
        start = 0
        while start < len(token_ids):
            size = chunks[min(len(parts), len(chunks) - 1)]
            parts.append(self.logits(Span(token_ids[start : start + size], table, start)))
            start += size
        return np.concatenate(parts)


class NanEmbedding(Embedding):
    """The real embedding, but for one token."""

    def __init__(
        self, weights_path: Path, matrix: StoredMatrix, scale: float, nan_token: int | None
    ) -> None:
        super().__init__(weights_path, matrix, scale)
        self._nan_token = nan_token

    def lookup(self, token_ids: Int32Array, out: Float32Array) -> None:
        super().lookup(token_ids, out)
        if self._nan_token is not None:
            out[token_ids == self._nan_token] = np.nan


def load_model(
    bundle: Bundle,
    kv_format: str = "int8",
    num_threads: int = 1,
    num_blocks: int = 64,
    max_tokens: int = 512,
    is_reference: bool = False,
    nan_token: int | None = None,
    kernels: str = "onnxruntime",
    max_model_len: int | None = None,
) -> LoadedModel:
    """`is_reference` takes the numpy attention. The embedding of `nan_token` is NaN.

    `kernels`: which runner, see `cpu_form.py`; the lane is one of sessions in any case. The pages
    are garbage.
    """
    config, pages_format = bundle.config, KV_FORMATS[kv_format]
    lane = CpuLane(config, bundle.path, max_tokens, max_tokens, num_threads)
    length = max_model_len or config.context_length
    attention: Attention = (
        NumpyAttention(config, pages_format, length)
        if is_reference
        else KernelAttention(config, pages_format, length, max_tokens, num_threads)
    )
    matrix = read_matrix(bundle.path / INDEX_FILE, "embed")
    embedding = NanEmbedding(bundle.weights_path, matrix, config.embedding_scale, nan_token)
    cache = PagedKVCache(config, pages_format, num_blocks)
    spoil(cache)
    runner: StepForm = ModelRunner(lane, attention, embedding, cache)
    if kernels == "auto" and has_panels(bundle):
        weights = PanelWeights(bundle, length)
        runner = KernelRunner(
            config, weights, embedding, cache, max_tokens, max_tokens, num_threads, length
        )
    sampler = Sampler(config.vocab_size)
    return LoadedModel(config, lane, attention, cache, runner, sampler, open_grammars(bundle))


def spoil(cache: PagedKVCache, seed: int = 0) -> None:
    """Garbage in every slot, as sequences leave it: also those whose keys were not finite."""
    rng = np.random.default_rng(seed)
    for pages in cache.layers:
        for array in (pages.keys, pages.values):
            if array.dtype == np.float32:
                array[:] = rng.standard_normal(array.shape, np.float32) * np.float32(1e4)
            else:
                array[:] = rng.integers(0, 256, array.shape, np.uint8).view(array.dtype)
        pages.value_scales[:] = np.float32(1e4)
        pages.key_scales[:] = np.nan
