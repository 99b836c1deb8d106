"""Loads the draft model of an engine, and finds out how much of the KV memory it takes."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.bundle import Bundle
from engine.cpu_form import open_cpu_form
from engine.embedding import Embedding
from engine.engine_parts import EngineParts
from engine.export.model import load_weights
from engine.kv_cache import PagedKVCache
from engine.kv_format import KV_FORMATS, KVFormat
from engine.speculation.config import Speculation, SpeculationConfig
from engine.speculation.draft_model import DraftModel
from engine.speculation.vocabulary import common_vocab_size

logger = logging.getLogger(__name__)


def kv_bytes_without_draft(
    config: SpeculationConfig, target: Bundle, kv_format: str, kv_bytes: int
) -> int:
    """The part of the KV memory that the model itself gets: both have the same number of blocks.

    Raises BundleError if the draft model's bundle is not usable.
    """
    pages = KV_FORMATS.get(kv_format)
    if config.draft_bundle is None or not config.uses_draft_model or pages is None:
        return kv_bytes
    ours = _bytes_per_token(target, pages)
    theirs = _bytes_per_token(Bundle.open(config.draft_bundle), pages)
    return kv_bytes * ours // (ours + theirs)


def _bytes_per_token(bundle: Bundle, kv_format: KVFormat) -> int:
    config = bundle.config
    return kv_format.bytes_per_token(config.num_layers, config.num_kv_heads, config.head_size)


def load_speculation(
    config: SpeculationConfig, parts: EngineParts, on_phase: Callable[[str], None]
) -> Speculation:
    """Raises BundleError, or DoesNotFit if the draft model has another vocabulary."""
    if config.draft_bundle is None or not config.uses_draft_model:
        return Speculation(config)
    on_phase("loading the draft model")
    bundle = Bundle.open(config.draft_bundle)
    vocab_size = common_vocab_size(parts.bundle, bundle)
    cache = PagedKVCache(bundle.config, parts.cache.kv_format, parts.cache.num_blocks)
    weights = load_weights(bundle.path)
    embedding = Embedding(bundle.weights_path, weights.embed, bundle.config.embedding_scale)
    runner = open_cpu_form(
        bundle, embedding, cache, parts.max_model_len, parts.max_tokens, parts.max_rows,
        parts.num_threads,
    )  # fmt: skip
    logger.info("%s drafts for %s", bundle.name, parts.bundle.name)
    model = DraftModel(runner, vocab_size, parts.max_tokens)
    model.warm_up()
    return Speculation(config, model)
