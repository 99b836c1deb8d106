"""Checkpoints of any architecture in memory, with random float32 weights of order one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.architectures.config import ModelConfig
from engine.architectures.rope import plain_rope, same_layers
from engine.architectures.table import tensor_shapes
from engine.bundle import Bundle
from engine.errors import ImportFailed
from engine.export.exporter import decoder_writer, write_bundle
from engine.export.packing import Packer, pack_dense
from engine.importers.checkpoint import CheckpointTensor
from engine.importers.integer_blocks import IntegerBlocks
from engine.importers.summary import CheckpointSummary
from engine.manifest import BundleSource
from engine.synthetic.tokenizer import synthetic_tokenizer
from tests.model_configs import make_config

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class MemoryTensor:
    name: str
    values: Floats
    quant_type: str = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def raw(self) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self.values).reshape(self.shape[0], -1).view(np.uint8)

    def dequantize(self) -> Floats:
        return self.values.copy()

    def rows(self, start: int, stop: int) -> Floats:
        return self.values[start:stop].copy()

    def blocks(self) -> IntegerBlocks | None:
        return None


@dataclass(frozen=True)
class MemoryCheckpoint:
    config: ModelConfig
    tensors: Mapping[str, Floats]
    digest: str = "0" * 64
    chat_template: str | None = None
    reads: list[str] = field(default_factory=list)
    """The names of all tensors that were asked for, in that order."""

    @property
    def tokenizer_json(self) -> str:
        return synthetic_tokenizer(self.config.vocab_size)

    @property
    def summary(self) -> CheckpointSummary:
        total = sum(values.size for values in self.tensors.values())
        return CheckpointSummary("tiny", "none", "F32", "bytes", total, "none", 0)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str) -> CheckpointTensor:
        self.reads.append(name)
        if name not in self.tensors:
            raise ImportFailed(f"tensor {name!r} is missing")
        return MemoryTensor(name, self.tensors[name])


def tiny_config(num_layers: int = 2, **changes: object) -> ModelConfig:
    """Two KV heads for six query heads, sizes that are whole blocks, an output head of its own."""
    config = make_config(num_layers, head_size=32)
    config = replace(
        config,
        hidden_size=128,
        intermediate_size=192,
        num_heads=6,
        num_kv_heads=2,
        vocab_size=272,
        layers=same_layers(num_layers),
        ropes=(plain_rope(32, 10_000.0),),
        tied_embeddings=False,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def random_checkpoint(config: ModelConfig, seed: int = 0) -> MemoryCheckpoint:
    """A few input channels are much larger than the rest, as in real models."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 2:
            tensors[name] = values * np.float32(shape[1] ** -0.5)
        elif name.endswith("norm"):
            tensors[name] = np.asarray(1 + values / 8, np.float32)
            tensors[name][:: shape[0] // 4] *= 6
        else:
            tensors[name] = values / np.float32(4)
    return MemoryCheckpoint(config, tensors)


def write_checkpoint(
    checkpoint: MemoryCheckpoint, folder: Path, packer: Packer = pack_dense
) -> Bundle:
    """The bundle `folder`; float32 unless another packer says otherwise."""
    source = BundleSource("memory", 0, 0, checkpoint.digest)
    writer = decoder_writer("auto", packer)
    return write_bundle(checkpoint, source, folder, folder.name, lambda done, total: None, writer)
