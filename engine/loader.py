"""Puts an engine together from a bundle: the composition root of this package."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from engine.architectures.config import ModelConfig
from engine.batch import Batch, Float32Array
from engine.bundle import Bundle
from engine.cpu_form import open_cpu_form
from engine.device_board import DeviceBoard, DeviceReport, LaneReport
from engine.dispatcher import CpuDispatcher
from engine.embedding import Embedding
from engine.engine_parts import EngineParts
from engine.errors import BundleError, DoesNotFit
from engine.export.model import INDEX_FILE
from engine.export.weights_file import read_matrix
from engine.grammar_matcher import GrammarFactory
from engine.kernels import kernel_cache
from engine.kv_cache import PagedKVCache, num_blocks_for
from engine.kv_format import BLOCK_SIZE, KV_FORMATS
from engine.kv_guard import choose_kv_format, read_kv_noise
from engine.lane_usage import Usage
from engine.model_runner import ModelRunner
from engine.npu.device_config import NpuSettings
from engine.npu.lane_gate import GateState
from engine.placement import CPU, EMULATED, Finding, Placement, place
from engine.recorder import Recorder
from engine.sampler import Sampler
from engine.self_test import is_batch_invariant, is_batch_invariant_form
from engine.speculation.config import Speculation, SpeculationConfig
from engine.speculation.draft_loader import kv_bytes_without_draft, load_speculation
from engine.warm_up import warm_up

logger = logging.getLogger(__name__)

OnPhase = Callable[[str], None]

_NOT_LOOKED_FOR = Finding(False, "")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine is told. `max_model_len` None: the model's own context length.

    `max_num_batched_tokens` bounds the tokens of a step, `max_logits_rows` the logits of one.
    `kernels` is one of `cpu_form.CPU_KERNELS`. `state_folder` holds what engines of this machine
    share (the NPU's lease, cost profiles); None: the user's cache. `npu` says how it is opened.
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
    kernels: str = "auto"
    state_folder: Path | None = None
    npu: NpuSettings = NpuSettings()
    speculation: SpeculationConfig = SpeculationConfig()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What turned out while loading; `max_model_len` is what the KV cache can really hold.

    `token_buckets`: the sizes of a step that need no padding; empty where all sizes are equal.
    """

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
    kv_format_reason: str = ""
    token_buckets: tuple[int, ...] = ()


class EngineRunner(Protocol):
    """What computes the steps and tells what it did."""

    @property
    def usage(self) -> Usage: ...

    def interrupt(self) -> None: ...

    def record(self, recorder: Recorder) -> None: ...

    def execute(self, batch: Batch) -> Float32Array: ...


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """`devices` tells how they are while the engine runs; `info` how it was when it was loaded."""

    runner: EngineRunner
    sampler: Sampler
    grammars: GrammarFactory
    info: EngineFacts
    devices: DeviceBoard
    speculation: Speculation


def load_engine(engine: EngineConfig, on_phase: OnPhase) -> LoadedEngine:
    """Raises BundleError, DeviceUnavailable or DoesNotFit, each with a line that says the fix."""
    placement = find_placement(engine.device)
    logger.info("device %s: %s", placement.device, placement.reason)
    parts = load_parts(engine, on_phase)
    speculation = load_speculation(engine.speculation, parts, on_phase)
    sampler = Sampler(parts.bundle.config.vocab_size, parts.num_threads)
    on_phase("warming up")
    warm_up(parts.cpu, sampler, parts.bundle.config)
    invariant = _is_batch_invariant(parts)
    if not invariant:
        logger.warning("this machine's matrix kernels are not batch-invariant")
    runner, devices = _open_runner(parts, placement, engine.state_folder, on_phase)
    kv_choice = choose_kv_format(engine.kv_format, read_kv_noise(parts.bundle.path))
    facts = replace(
        _facts(parts, placement, invariant),
        kv_format_reason=kv_choice.reason,
        token_buckets=_token_buckets(placement, engine),
    )
    grammars = open_grammars(parts.bundle)
    return LoadedEngine(runner, sampler, grammars, facts, devices, speculation)


def find_placement(device: str) -> Placement:
    """Looks for an NPU if one might be used. Raises DeviceUnavailable."""
    if device == CPU:
        return place(CPU, _NOT_LOOKED_FOR, _NOT_LOOKED_FOR)
    from engine.npu.qnn_session import find_emulator, find_npu

    if device == EMULATED:
        return place(device, _NOT_LOOKED_FOR, Finding(*find_emulator()))
    return place(device, Finding(*find_npu()), _NOT_LOOKED_FOR)


def load_parts(engine: EngineConfig, on_phase: OnPhase) -> EngineParts:
    """All but the NPU. Raises BundleError or DoesNotFit."""
    bundle = Bundle.open(engine.bundle)
    kv_choice = choose_kv_format(engine.kv_format, read_kv_noise(bundle.path))
    logger.log(
        logging.WARNING if kv_choice.is_risky else logging.INFO,
        "KV format %s: %s",
        kv_choice.kv_format,
        kv_choice.reason,
    )
    engine = replace(engine, kv_format=kv_choice.kv_format)
    kv_bytes = kv_bytes_without_draft(
        engine.speculation, bundle, engine.kv_format, engine.kv_memory_bytes
    )
    cache = _make_cache(bundle.config, replace(engine, kv_memory_bytes=kv_bytes))
    max_model_len = _max_model_len(bundle.config, engine, cache)
    compiled = kernel_cache.use_kernel_cache(engine.kernel_cache or kernel_cache.default_folder())
    on_phase("loading the weights" if compiled else "compiling the kernels (once, up to a minute)")
    embedding = _open_embedding(bundle)
    max_tokens = engine.max_num_batched_tokens
    max_rows = max(engine.max_logits_rows, engine.max_num_seqs)
    cpu = open_cpu_form(
        bundle,
        embedding,
        cache,
        max_model_len,
        max_tokens,
        max_rows,
        engine.num_threads,
        engine.kernels,
    )
    return EngineParts(
        bundle,
        embedding,
        cache,
        cpu,
        max_model_len,
        max_tokens,
        max_rows,
        engine.num_threads,
        engine.npu,
    )


def _open_runner(
    parts: EngineParts, placement: Placement, state_folder: Path | None, on_phase: OnPhase
) -> tuple[EngineRunner, DeviceBoard]:
    if placement.wants_npu:
        from engine.npu.engine import open_beside_cpu

        return open_beside_cpu(parts, placement, state_folder, on_phase)
    lanes = (LaneReport(CPU, GateState.OPEN),)
    board = DeviceBoard(DeviceReport(CPU, placement.reason, lanes, "everything on the cpu"))
    return CpuDispatcher(parts.cpu), board


def _is_batch_invariant(parts: EngineParts) -> bool:
    if isinstance(parts.cpu, ModelRunner):
        return is_batch_invariant(parts.cpu.lane)
    room = parts.cache.num_blocks * BLOCK_SIZE
    return is_batch_invariant_form(parts.cpu, min(parts.max_tokens, parts.max_model_len, room))


def _token_buckets(placement: Placement, engine: EngineConfig) -> tuple[int, ...]:
    if not placement.wants_npu:
        return ()
    from engine.npu.opening import token_buckets

    return token_buckets(placement.device, engine.npu)


def _facts(parts: EngineParts, placement: Placement, batch_invariant: bool) -> EngineFacts:
    return EngineFacts(
        max_model_len=parts.max_model_len,
        num_blocks=parts.cache.num_blocks,
        block_size=BLOCK_SIZE,
        kv_format=parts.cache.kv_format.name,
        vocab_size=parts.bundle.config.vocab_size,
        device=placement.device,
        device_reason=placement.reason,
        num_threads=parts.num_threads,
        batch_invariant=batch_invariant,
        weight_format=parts.bundle.weight_format,
        kv_bytes=parts.cache.num_bytes,
    )


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
    return Embedding(bundle.weights_path, matrix, bundle.config.embedding_scale)
