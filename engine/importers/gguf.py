"""A GGUF file as a `Checkpoint`: canonical names, checked shapes, RoPE rows in half-split order.

Whatever of the file would change the computation and is not done here is refused by name:
settings, tensors without a role, unknown storages. Nothing of the weights is read on opening.
Does not know how weights are packed for a device.
"""

from __future__ import annotations

import dataclasses
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
from engine.architectures.gguf import GGUF_ARCHITECTURES, check_architecture, read_gguf_config
from engine.architectures.gguf_rope import FACTOR_TENSORS
from engine.architectures.names import TensorNames
from engine.architectures.table import tensor_shapes
from engine.errors import ImportFailed
from engine.importers.chat_template import find_in_metadata
from engine.importers.gguf_blocks import integer_blocks
from engine.importers.gguf_metadata import Metadata
from engine.importers.gguf_reader import GgufFile, TensorInfo
from engine.importers.gguf_split import open_whole_gguf
from engine.importers.gguf_tokenizer import build_tokenizer
from engine.importers.integer_blocks import IntegerBlocks
from engine.importers.source_files import files_digest, split_parts
from engine.importers.summary import CheckpointSummary
from engine.importers.tokenizer_parts import TokenizerParts

# The storages that gguf's reference code can turn into floats.
SUPPORTED_QUANT_TYPES = frozenset(
    {"F64", "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    | {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"}
    | {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"}
)


def read_gguf(path: Path) -> GgufCheckpoint:
    """Opens and checks everything but the weights' values. Raises ImportFailed."""
    file = open_whole_gguf(path)
    metadata = Metadata(file.path, file.metadata)
    check_architecture(metadata)
    tokenizer = build_tokenizer(metadata)
    names = frozenset(file.tensors)
    config = read_gguf_config(metadata, tokenizer.vocab_size, names, read_rope_factors(file))
    config = dataclasses.replace(
        config,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=tokenizer.eos_token_ids,
        add_bos=tokenizer.add_bos,
    )
    tensors = match_tensors(file, GGUF_ARCHITECTURES[config.architecture], config)
    return GgufCheckpoint(file, metadata, config, tokenizer, tensors)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Implements `CheckpointTensor`: all of the file's tensor, or the rows from `first_row` on.

    `rope_head_size`: the rows are in interleaved RoPE order with heads of this size; None when
    there is nothing to reorder."""

    name: str
    info: TensorInfo
    file: GgufFile
    shape: tuple[int, ...]
    rope_head_size: int | None = None
    first_row: int = 0

    @property
    def quant_type(self) -> str:
        return self.info.quant_type

    def raw(self) -> NDArray[np.uint8]:
        return self._raw_rows(0, self.shape[0] if len(self.shape) == 2 else 1)

    def dequantize(self) -> NDArray[np.float32]:
        values = self._dequantized(self.raw()).reshape(self.shape)
        if len(self.shape) == 1 and self.rope_head_size is not None:
            return values[half_split_order(len(values), self.rope_head_size)]
        return values

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        return self._dequantized(self._raw_rows(start, stop))

    def blocks(self) -> IntegerBlocks | None:
        return integer_blocks(self.quant_type, self.raw())

    def _raw_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        file_rows = self.info.shape[0] if len(self.shape) == 2 else 1
        data = self.file.tensor_bytes(self.info).reshape(file_rows, -1)[self.first_row :]
        if self.rope_head_size is None or len(self.shape) == 1:
            return data[start:stop]
        # A row is quantized by itself, so moving whole rows is exact.
        return data[half_split_order(self.shape[0], self.rope_head_size)[start:stop]]

    def _dequantized(self, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
        # An aligned copy: float storages are viewed, and a row may begin at any byte.
        aligned = np.array(raw)
        if self.quant_type == "F64":
            return aligned.view("<f8").astype(np.float32)
        with np.errstate(
            all="ignore"
        ):  # scales that are no numbers are refused where they are used
            values = dequantize(aligned, GGMLQuantizationType[self.quant_type])
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
        self.chat_template = find_in_metadata(metadata)

    @cached_property
    def digest(self) -> str:
        return files_digest(split_parts(self._file.path))

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
            num_file_bytes=self._file.num_bytes,
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


def read_rope_factors(file: GgufFile) -> dict[str, NDArray[np.float32]]:
    """The small tensors that hold numbers of RoPE and no weights."""
    factors = {}
    for name in FACTOR_TENSORS & file.tensors.keys():
        info = file.tensors[name]
        if info.quant_type != "F32" or len(info.shape) != 1:
            raise ImportFailed(f"{file.path}: tensor {name!r} is no list of 32-bit floats")
        factors[name] = GgufTensor(name, info, file, info.shape).dequantize()
    return factors


def match_tensors(file: GgufFile, names: TensorNames, config: ModelConfig) -> dict[str, GgufTensor]:
    """Canonical name → tensor. Every tensor of the file has a role, and every role its tensor."""
    shapes = tensor_shapes(config)
    # Parts of one tensor of the file are its row ranges, in the order of the shapes.
    num_rows: dict[str, int] = {}
    first_rows = {}
    for name, shape in shapes.items():
        gguf_name, _ = gguf_tensor_name(names, name)
        first_rows[name] = num_rows.get(gguf_name, 0)
        num_rows[gguf_name] = first_rows[name] + shape[0]
    tensors = {}
    for name, shape in shapes.items():
        gguf_name, part = gguf_tensor_name(names, name)
        info = file.tensors.get(gguf_name)
        if info is None:
            raise ImportFailed(
                f"{file.path}: tensor {gguf_name!r} is missing; use another conversion of the model"
            )
        check_tensor(file.path, info, (num_rows[gguf_name], *shape[1:]))
        head_size = config.head_size if part in names.interleaved else None
        tensors[name] = GgufTensor(name, info, file, shape, head_size, first_rows[name])
    refuse_unused(file.path, sorted(file.tensors.keys() - num_rows.keys() - FACTOR_TENSORS))
    return tensors


def gguf_tensor_name(names: TensorNames, name: str) -> tuple[str, str]:
    """`layers.3.q` → (`blk.3.attn_q.weight`, `q`)."""
    if name in names.global_tensors:
        return names.global_tensors[name], name
    _, layer, part = name.split(".")
    return f"blk.{layer}.{names.layer_tensors[part]}", part


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
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ImportFailed(
            f"{path}: tensors without a role in this architecture: {', '.join(names[:3])}{more}; "
            "such models are not supported yet"
        )
