"""Puts an engine together from a bundle: the composition root of this package."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine import kernel_cache
from engine.architectures.config import ModelConfig
from engine.attention_kernel import KernelAttention
from engine.bundle import Bundle
from engine.embedding import Embedding
from engine.errors import BundleError, DoesNotFit
from engine.export.model import INDEX_FILE
from engine.export.weights_file import read_matrix
from engine.grammar_matcher import GrammarFactory
from engine.kv_cache import PagedKVCache, num_blocks_for
from engine.kv_format import BLOCK_SIZE, KV_FORMATS
from engine.lane import CpuLane
from engine.model_runner import ModelRunner
from engine.placement import place
from engine.sampler import Sampler
from engine.self_test import is_batch_invariant
from engine.session import find_npu
from engine.warm_up import warm_up

logger = logging.getLogger(__name__)

OnPhase = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine is told. `max_model_len` None: the model's own context length.

    `max_num_batched_tokens` bounds the tokens of a step, `max_logits_rows` the logits of one.
    """

    bundle: Path
    device: str
    num_threads: int
    kv_memory_bytes: int
    kv_format: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logits_rows: int = 64
    kernel_cache: Path | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What turned out while loading; `max_model_len` is what the KV cache can really hold."""

    max_model_len: int
    num_blocks: int
    block_size: int
    kv_format: str
    vocab_size: int
    device: str
    device_reason: str
    num_threads: int
    batch_invariant: bool
    weight_format: str
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    runner: ModelRunner
    sampler: Sampler
    grammars: GrammarFactory
    info: EngineFacts


def load_engine(engine: EngineConfig, on_phase: OnPhase) -> LoadedEngine:
    """Raises BundleError, DeviceUnavailable or DoesNotFit, each with a line that says the fix."""
    bundle = Bundle.open(engine.bundle)
    config = bundle.config
    placement = place(engine.device, *(find_npu() if engine.device != "cpu" else (False, "")))
    logger.info("device %s: %s", placement.device, placement.reason)
    cache = _make_cache(config, engine)
    max_model_len = _max_model_len(config, engine, cache)
    on_phase("loading the weights")
    lane = CpuLane(
        config,
        bundle.path,
        engine.max_num_batched_tokens,
        max(engine.max_logits_rows, engine.max_num_seqs),
        engine.num_threads,
    )
    attention = KernelAttention(
        config, cache.kv_format, max_model_len, engine.max_num_batched_tokens, engine.num_threads
    )
    runner = ModelRunner(lane, attention, _open_embedding(bundle), cache)
    sampler = Sampler(config.vocab_size)
    compiled = kernel_cache.use_kernel_cache(engine.kernel_cache or kernel_cache.default_folder())
    on_phase("warming up" if compiled else "compiling the kernels (once, about half a minute)")
    warm_up(runner, sampler, config)
    invariant = is_batch_invariant(lane)
    if not invariant:
        logger.warning("this machine's matrix kernels are not batch-invariant")
    facts = EngineFacts(
        max_model_len=max_model_len,
        num_blocks=cache.num_blocks,
        block_size=BLOCK_SIZE,
        kv_format=cache.kv_format.name,
        vocab_size=config.vocab_size,
        device=placement.device,
        device_reason=placement.reason,
        num_threads=engine.num_threads,
        batch_invariant=invariant,
        weight_format=bundle.weight_format,
        kv_bytes=cache.num_bytes,
    )
    return LoadedEngine(runner, sampler, open_grammars(bundle), facts)


def open_grammars(bundle: Bundle) -> GrammarFactory:
    """The grammars of the bundle's vocabulary; its tokenizer is read with the first of them."""
    size = bundle.config.vocab_size
    ends = [token_id for token_id in bundle.config.eos_token_ids if 0 <= token_id < size]
    return GrammarFactory(partial(bundle.tokenizer_path.read_text, "utf-8"), ends, size)


def _make_cache(config: ModelConfig, engine: EngineConfig) -> PagedKVCache:
    kv_format = KV_FORMATS.get(engine.kv_format)
    if kv_format is None:
        raise DoesNotFit(f"unknown KV format {engine.kv_format!r}: use one of {[*KV_FORMATS]}")
    longest = min(config.context_length, engine.max_model_len or config.context_length)
    num_blocks_wanted = engine.max_num_seqs * -(-longest // BLOCK_SIZE)
    num_blocks = num_blocks_for(config, kv_format, engine.kv_memory_bytes, num_blocks_wanted)
    return PagedKVCache(config, kv_format, num_blocks)


def _max_model_len(config: ModelConfig, engine: EngineConfig, cache: PagedKVCache) -> int:
    """The model's limit, the user's and the cache's, whichever is least."""
    if engine.max_model_len is not None and engine.max_model_len < BLOCK_SIZE:
        raise DoesNotFit(
            f"--max-model-len {engine.max_model_len} is less than one block of {BLOCK_SIZE} tokens"
        )
    if engine.max_model_len is not None and engine.max_model_len > config.context_length:
        raise DoesNotFit(
            f"--max-model-len {engine.max_model_len} is more than the {config.context_length} "
            "tokens this model was trained for"
        )
    wanted = engine.max_model_len or config.context_length
    room = cache.num_blocks * BLOCK_SIZE
    if wanted > room and engine.max_model_len is not None:
        raise DoesNotFit(
            f"--max-model-len {wanted} does not fit: {engine.kv_memory_bytes:,} bytes of KV memory "
            f"hold {room} tokens in {engine.kv_format}; give --kv-memory more or use a smaller "
            "KV format"
        )
    return min(wanted, room)


def _open_embedding(bundle: Bundle) -> Embedding:
    try:
        matrix = read_matrix(bundle.path / INDEX_FILE, "embed")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BundleError(
            f"{bundle.path / INDEX_FILE} is damaged ({error}); "
            f"run: hexlm pull {bundle.name} --force"
        ) from error
    return Embedding(bundle.weights_path, matrix)
