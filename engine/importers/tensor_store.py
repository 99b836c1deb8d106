"""All tensors of a model in safetensors: one file, or shards that an index lists.

    model.safetensors                    alone, or
    model.safetensors.index.json         {"weight_map": {tensor name: shard file}}
    model-00001-of-00003.safetensors …   beside the index

The index is data of strangers: a shard is a plain file name beside it, and what index and shards
say of each other must agree. Nothing of the weights is read on opening. Knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.errors import ImportFailed
from engine.importers.json_file import read_json_file
from engine.importers.safetensors_reader import SafetensorsFile, TensorEntry, open_safetensors
from engine.importers.source_files import is_index

MAX_SHARDS = 4096
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor and the file that holds it."""

    file: SafetensorsFile
    entry: TensorEntry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    def floats(self) -> NDArray[np.float32]:
        return self.file.read(self.entry)

    def integers(self) -> NDArray[np.integer]:
        return self.file.read_integers(self.entry)


@dataclass(frozen=True, slots=True)
class TensorStore:
    """`path` is the file that was opened, `files` all files with weights."""

    path: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def get(self, name: str) -> StoredTensor:
        """Raises ImportFailed when there is no such tensor."""
        if name not in self.tensors:
            raise ImportFailed(f"{self.path}: tensor {name!r} is missing; download the model again")
        return self.tensors[name]


def open_tensors(path: Path) -> TensorStore:
    """Opens a safetensors file or an index with its shards. Raises ImportFailed."""
    if not is_index(path):
        file = open_safetensors(path)
        return TensorStore(path, (path,), _tensors_of(file))
    shard_of = _read_weight_map(path)
    tensors: dict[str, StoredTensor] = {}
    shards = sorted(set(shard_of.values()))
    for shard in shards:
        for name, tensor in _tensors_of(_open_shard(path, shard)).items():
            if name in tensors:
                raise _contradicts(path, f"tensor {name!r} is in two shards")
            tensors[name] = tensor
    for name, shard in shard_of.items():
        if name not in tensors or tensors[name].file.path.name != shard:
            raise _contradicts(path, f"tensor {name!r} is not in {shard}")
    return TensorStore(path, tuple(path.parent / shard for shard in shards), tensors)


def _tensors_of(file: SafetensorsFile) -> dict[str, StoredTensor]:
    return {name: StoredTensor(file, entry) for name, entry in file.entries.items()}


def _open_shard(index: Path, shard: str) -> SafetensorsFile:
    path = index.parent / shard
    if not path.exists():
        raise ImportFailed(f"{path} is missing, which {index.name} lists; download it")
    return open_safetensors(path)


def _read_weight_map(path: Path) -> dict[str, str]:
    document = read_json_file(path)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ImportFailed(f"{path} has no weight_map; download it again")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise ImportFailed(
                f"{path} names the shard {str(shard)[:60]!r}, which is not the name of a "
                "safetensors file beside it; do not use this model"
            )
    if (num_shards := len(set(weight_map.values()))) > MAX_SHARDS:
        raise ImportFailed(f"{path} lists {num_shards} shards, more than {MAX_SHARDS}")
    return {str(name): str(shard) for name, shard in weight_map.items()}


def _contradicts(path: Path, problem: str) -> ImportFailed:
    return ImportFailed(f"{path} and its shards contradict each other: {problem}; download again")
