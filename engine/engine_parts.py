"""The loaded parts of an engine that all of its devices share, and the CPU's own form of a step."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from engine.bundle import Bundle
from engine.embedding import Embedding
from engine.kernels.attention_kernel import KernelAttention
from engine.kv_cache import PagedKVCache
from engine.lane import CpuLane
from engine.lane_timing import Pages
from engine.npu.device_config import NpuSettings
from engine.placement import ROW_BUCKETS
from engine.profile_store import ProfileKey
from engine.step_form import StepForm

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What both devices share, and the CPU's own form of a step."""

    bundle: Bundle
    embedding: Embedding
    cache: PagedKVCache
    cpu: StepForm
    max_model_len: int
    max_tokens: int
    max_rows: int
    num_threads: int
    npu: NpuSettings = NpuSettings()

    @property
    def token_counts(self) -> tuple[int, ...]:
        """For measuring: the buckets that fit."""
        return tuple(n for n in ROW_BUCKETS if n <= self.max_tokens)

    @property
    def row_counts(self) -> tuple[int, ...]:
        return tuple(n for n in ROW_BUCKETS if n <= min(self.max_rows, self.max_tokens, 64))

    @property
    def pages(self) -> Pages:
        return Pages(self.cache.num_blocks, self.max_model_len)

    def attention(self) -> KernelAttention:
        return KernelAttention(
            self.bundle.config,
            self.cache.kv_format,
            self.max_model_len,
            self.max_tokens,
            self.num_threads,
        )

    def open_cpu_lane(self) -> CpuLane:
        """The CPU's lane of sessions, for steps that are divided. Takes memory for its weights."""
        logger.info("opening the CPU's lane for steps that are divided between the devices")
        config, folder = self.bundle.config, self.bundle.path
        return CpuLane(config, folder, self.max_tokens, self.max_rows, self.num_threads)

    def profile_key(self, device: str) -> ProfileKey:
        digest = f"{self.bundle.source.sha256} {self.bundle.weight_format}"
        name, kv_format = self.bundle.name, self.cache.kv_format.name
        return ProfileKey(name, digest, device, self.num_threads, kv_format)
