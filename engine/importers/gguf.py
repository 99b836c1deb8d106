"""A GGUF file as a `Checkpoint`: canonical names, checked shapes, RoPE rows in half-split order.

Whatever of the file would change the computation and is not done here is refused by name:
settings, tensors without a role, unknown storages. Nothing of the weights is read on opening.
Does not know how weights are packed for a device.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from engine.architectures.config import ModelConfig
from engine.architectures.table import (
    ARCHITECTURES,
    GGUF_GLOBAL_TENSORS,
    Architecture,
    tensor_shapes,
)
from engine.errors import ImportFailed
from engine.importers.gguf_metadata import Metadata, shorten
from engine.importers.gguf_reader import GgufFile, TensorInfo, open_gguf
from engine.importers.gguf_tokenizer import TokenizerParts, build_tokenizer
from engine.importers.summary import CheckpointSummary

# The storages that gguf's reference code can turn into floats.
SUPPORTED_QUANT_TYPES = frozenset(
    {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    | {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
)
MAX_SIZE = 1 << 24


def read_gguf(path: Path) -> GgufCheckpoint:
    """Opens and checks everything but the weights' values. Raises ImportFailed."""
    file = open_gguf(path)
    metadata = Metadata(path, file.metadata)
    refuse_split(metadata)
    architecture = read_architecture(metadata)
    tokenizer = build_tokenizer(metadata)
    refuse_settings(metadata, architecture)
    config = read_config(file, metadata, architecture, tokenizer)
    tensors = match_tensors(file, architecture, config)
    return GgufCheckpoint(file, metadata, config, tokenizer, tensors)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Implements `CheckpointTensor`. `rope_head_size`: the rows are in interleaved RoPE order
    with heads of this size; None when there is nothing to reorder."""

    name: str
    info: TensorInfo
    file: GgufFile
    rope_head_size: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def quant_type(self) -> str:
        return self.info.quant_type

    def raw(self) -> NDArray[np.uint8]:
        rows = self.shape[0] if len(self.shape) == 2 else 1
        data = self.file.tensor_bytes(self.info).reshape(rows, -1)
        if self.rope_head_size is None:
            return data
        # A row is quantized by itself, so moving whole rows is exact.
        return data[half_split_order(rows, self.rope_head_size)]

    def dequantize(self) -> NDArray[np.float32]:
        quant_type = GGMLQuantizationType[self.quant_type]
        # An aligned copy: float storages are viewed, and a row may begin at any byte.
        values = dequantize(np.array(self.raw()), quant_type).reshape(self.shape)
        return np.ascontiguousarray(values, dtype=np.float32)


def half_split_order(num_rows: int, head_size: int) -> NDArray[np.intp]:
    """[rows]: which row of an interleaved file goes where. A head's pair (2i, 2i + 1) becomes
    (i, i + head_size / 2), as in transformers."""
    rows = np.arange(num_rows).reshape(-1, head_size // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


class GgufCheckpoint:
    """Implements `Checkpoint`. Holds the file's mapping for as long as it lives."""

    def __init__(
        self,
        file: GgufFile,
        metadata: Metadata,
        config: ModelConfig,
        tokenizer: TokenizerParts,
        tensors: dict[str, GgufTensor],
    ) -> None:
        self._file = file
        self._metadata = metadata
        self._tokenizer = tokenizer
        self._tensors = tensors
        self.config = config
        self.tokenizer_json = tokenizer.json
        self.chat_template = metadata.optional_string("tokenizer.chat_template")

    @cached_property
    def digest(self) -> str:
        with self._file.path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    @property
    def summary(self) -> CheckpointSummary:
        def text(key: str) -> str:
            value = self._metadata.values.get(key)
            return value if isinstance(value, str) else ""

        return CheckpointSummary(
            title=text("general.name"),
            licence=text("general.license"),
            quantization=main_quantization(self._tensors),
            pre_tokenizer=self._tokenizer.kind,
            num_parameters=sum(prod(tensor.shape) for tensor in self._tensors.values()),
            file_name=self._file.path.name,
            num_file_bytes=len(self._file.data),
        )

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> GgufTensor:
        if name not in self._tensors:
            raise ImportFailed(f"{self._file.path} has no tensor {name!r}")
        return self._tensors[name]


def main_quantization(tensors: dict[str, GgufTensor]) -> str:
    num_bytes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        if name.startswith("layers."):
            num_bytes[tensor.quant_type] += tensor.info.num_bytes
    return num_bytes.most_common(1)[0][0]


def refuse_split(metadata: Metadata) -> None:
    if metadata.integer("split.count", 0, MAX_SIZE, default=0) > 1:
        raise ImportFailed(
            f"{metadata.path} is one part of a split GGUF, which is not supported yet; merge the "
            "parts into one file or give a model that is one file"
        )


def read_architecture(metadata: Metadata) -> Architecture:
    name = metadata.string("general.architecture")
    if name not in ARCHITECTURES:
        raise ImportFailed(
            f"{metadata.path}: unsupported architecture {shorten(name)}; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def refuse_settings(metadata: Metadata, architecture: Architecture) -> None:
    """Settings that would change the computation in a way that we do not do."""
    for suffix, neutral in architecture.gguf_neutral_values.items():
        key = f"{architecture.name}.{suffix}"
        if key in metadata and not is_neutral(metadata.values[key], neutral):
            value = shorten(metadata.values[key])
            raise ImportFailed(f"{metadata.path}: {key} = {value} is not supported yet")


def is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    return not isinstance(value, np.ndarray) and any(value == allowed for allowed in neutral)


def read_config(
    file: GgufFile, metadata: Metadata, architecture: Architecture, tokenizer: TokenizerParts
) -> ModelConfig:
    prefix = architecture.name

    def size(key: str, default: int | None = None, high: int = MAX_SIZE) -> int:
        return metadata.integer(f"{prefix}.{key}", 1, high, default)

    hidden_size = size("embedding_length")
    num_heads = size("attention.head_count", high=hidden_size)
    head_size = size("attention.key_length", default=max(hidden_size // num_heads, 1))
    config = ModelConfig(
        architecture=architecture.name,
        num_layers=size("block_count", high=max(len(file.tensors), 1)),
        hidden_size=hidden_size,
        intermediate_size=size("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=size("attention.head_count_kv", default=num_heads, high=num_heads),
        head_size=head_size,
        vocab_size=tokenizer.vocab_size,
        context_length=size("context_length"),
        rms_norm_eps=metadata.positive_float(f"{prefix}.attention.layer_norm_rms_epsilon"),
        rope_theta=metadata.positive_float(f"{prefix}.rope.freq_base", 10_000.0),
        tied_embeddings=GGUF_GLOBAL_TENSORS["lm_head"] not in file.tensors,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=tokenizer.eos_token_ids,
        add_bos=tokenizer.add_bos,
    )
    check_heads(metadata, prefix, config)
    return config


def check_heads(metadata: Metadata, prefix: str, config: ModelConfig) -> None:
    """The attention that we compute: equal head sizes, whole groups, RoPE over the whole head."""
    head_size = config.head_size
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(f"{prefix}.{key}", 0, MAX_SIZE, head_size) != head_size:
            raise ImportFailed(
                f"{metadata.path}: {prefix}.{key} = {metadata.values[f'{prefix}.{key}']} with "
                f"heads of {head_size} is not supported yet (both must be equal)"
            )
    if head_size % 2 or config.num_heads % config.num_kv_heads:
        raise ImportFailed(
            f"{metadata.path}: {config.num_heads} heads and {config.num_kv_heads} KV heads of "
            f"{head_size} do not fit together; use another conversion of the model"
        )


def match_tensors(
    file: GgufFile, architecture: Architecture, config: ModelConfig
) -> dict[str, GgufTensor]:
    """Canonical name → tensor. Every tensor of the file has a role, and every role its tensor."""
    tensors = {}
    unused = dict(file.tensors)
    for name, shape in tensor_shapes(config).items():
        gguf_name, part = gguf_tensor_name(architecture, name)
        info = unused.pop(gguf_name, None)
        if info is None:
            raise ImportFailed(
                f"{file.path}: tensor {gguf_name!r} is missing; use another conversion of the model"
            )
        check_tensor(file.path, info, shape)
        is_interleaved = part in architecture.gguf_interleaved
        tensors[name] = GgufTensor(name, info, file, config.head_size if is_interleaved else None)
    refuse_unused(file.path, list(unused))
    return tensors


def gguf_tensor_name(architecture: Architecture, name: str) -> tuple[str, str]:
    """`layers.3.q` → (`blk.3.attn_q.weight`, `q`)."""
    if name in GGUF_GLOBAL_TENSORS:
        return GGUF_GLOBAL_TENSORS[name], name
    _, layer, part = name.split(".")
    return f"blk.{layer}.{architecture.gguf_layer_tensors[part]}", part


def check_tensor(path: Path, info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        raise ImportFailed(
            f"{path}: tensor {info.name!r} has the shape {list(info.shape)}, expected "
            f"{list(shape)}; use another conversion of the model"
        )
    if info.quant_type not in SUPPORTED_QUANT_TYPES:
        raise ImportFailed(
            f"{path}: tensor {info.name!r} has the unsupported type {info.quant_type}; "
            f"supported: {', '.join(sorted(SUPPORTED_QUANT_TYPES))}"
        )


def refuse_unused(path: Path, names: list[str]) -> None:
    if "rope_freqs.weight" in names:
        raise ImportFailed(
            f"{path}: RoPE scaling factors (rope_freqs.weight) are not supported yet"
        )
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ImportFailed(
            f"{path}: tensors without a role in this architecture: {', '.join(names[:3])}{more}; "
            "such models are not supported yet"
        )
