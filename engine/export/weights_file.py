"""One external-data file that every graph of a bundle points into, written front to back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import onnx
from numpy.typing import NDArray

ALIGNMENT_BYTES = 4096
_ONNX_TYPES = {
    np.dtype(np.uint8): onnx.TensorProto.UINT8,
    np.dtype(np.float32): onnx.TensorProto.FLOAT,
}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Where an array lies: `offset` and `num_bytes` in bytes, from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def initializer(self, location: str) -> onnx.TensorProto:
        """The array as an ONNX initializer with external data in the file called `location`."""
        tensor = onnx.TensorProto(
            name=self.name, dims=self.shape, data_type=_ONNX_TYPES[np.dtype(self.dtype)]
        )
        tensor.data_location = onnx.TensorProto.EXTERNAL
        entries = {"location": location, "offset": self.offset, "length": self.num_bytes}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))
        return tensor


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A packed [N, K] matrix in the weights file (`packing.PackedMatrix` says what it means).

    `bias` [N] float32 is added to what the matrix gives.
    """

    bits: int
    num_rows: int
    num_cols: int
    data: StoredArray
    scales: StoredArray | None
    block_size: int = 32
    zero_points: StoredArray | None = None
    bias: StoredArray | None = None


class AlignedFile:
    """A file of stretches that each begin at a page, so that they can be mapped."""

    def __init__(self, path: Path) -> None:
        self.stream = path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stream.close()

    def begin(self) -> int:
        """The offset of the next stretch, to which writing goes now."""
        offset = -(-self.stream.tell() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return self.stream.seek(offset)


class WeightsFile(AlignedFile):
    """Appends arrays. A context manager."""

    def append(self, name: str, array: NDArray[np.generic]) -> StoredArray:
        """Raises OSError when the disk is full."""
        offset = self.begin()
        data = np.ascontiguousarray(array)
        self.stream.write(data.data)
        return StoredArray(name, data.dtype.name, data.shape, offset, data.nbytes)


def read_matrix(path: Path, name: str) -> StoredMatrix:
    """Raises OSError, ValueError, KeyError or TypeError when the index is not one of ours."""
    return decode_matrix(json.loads(path.read_text())[name])


def decode_matrix(entry: object) -> StoredMatrix:
    """What `asdict` made of a matrix. Raises KeyError or TypeError for anything else."""
    if not isinstance(entry, dict):
        raise TypeError("the entry of a matrix is no object")
    entry["data"] = decode_array(entry["data"])
    for name in ("scales", "zero_points", "bias"):
        if entry.get(name) is not None:
            entry[name] = decode_array(entry[name])
    return StoredMatrix(**entry)


def decode_array(entry: object) -> StoredArray:
    if not isinstance(entry, dict):
        raise TypeError("the entry of an array is no object")
    return StoredArray(**(entry | {"shape": tuple(entry["shape"])}))


def map_array(path: Path, array: StoredArray) -> NDArray[np.generic]:
    """A read-only view of the mapped file. Raises ValueError when the file is too short."""
    return np.memmap(path, np.dtype(array.dtype), "r", array.offset, array.shape)
