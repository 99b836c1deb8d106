"""Reads the GGUF container (versions 2 and 3, little-endian): metadata and where tensors lie.

Hardened: every count, length, size and offset is compared with the size of the file before
anything is allocated or sliced, so a damaged or hostile file ends in ImportFailed and never in
a crash or in weights made of zeros. Tensors are not read, only located in the mapped file.
Knows nothing about models: keys and tensor names have no meaning here.

Source: the GGUF specification in ggml's `docs/gguf.md`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from engine.errors import ImportFailed
from engine.importers.file_kind import GGUF_MAGIC, HEAD_BYTES, describe_foreign, map_regular_file

SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4
MAX_NAME_BYTES = 65_535

# Bytes of the smallest entry: what bounds the counts before anything is read.
MIN_METADATA_BYTES = 8 + 4 + 1
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

Scalar = bool | int | float | str
NumberArray = NDArray[np.generic]
Value = Scalar | NumberArray | list[str] | list["Value"]

SCALAR_FORMATS: dict[int, str] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
ARRAY_DTYPES: dict[int, str] = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
STRING_TYPE = 8
ARRAY_TYPE = 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in numpy's order, `start` counts from the file's begin;
    `part` is the number of the file in a model of several."""

    name: str
    shape: tuple[int, ...]
    quant_type: str
    start: int
    num_bytes: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class GgufFile:
    """`data` are the bytes of the file, `more_data` those of the other parts of a split model."""

    path: Path
    version: int
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]
    data: NDArray[np.uint8]
    more_data: tuple[NDArray[np.uint8], ...] = ()

    @property
    def num_bytes(self) -> int:
        return len(self.data) + sum(len(part) for part in self.more_data)

    def tensor_bytes(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """[bytes] of the tensor, a view of the mapped file."""
        data = (self.data, *self.more_data)[tensor.part]
        return data[tensor.start : tensor.start + tensor.num_bytes]


def open_gguf(path: Path) -> GgufFile:
    """Raises ImportFailed with the file, the key or tensor and the numbers."""
    data = map_regular_file(path)
    head = data[:HEAD_BYTES].tobytes()
    if not head.startswith(GGUF_MAGIC):
        raise ImportFailed(f"{path} is {describe_foreign(head)}")
    cursor = Cursor(path, data, position=len(GGUF_MAGIC))
    version = read_version(cursor)
    num_tensors = cursor.count("tensors", MIN_TENSOR_BYTES)
    num_metadata = cursor.count("metadata entries", MIN_METADATA_BYTES)
    metadata = read_metadata(cursor, num_metadata)
    tensors = read_tensors(cursor, num_tensors, read_alignment(path, metadata))
    return GgufFile(path, version, metadata, tensors, data)


class Cursor:
    """A position in the header that cannot leave the file. `where` names what is being read."""

    def __init__(self, path: Path, data: NDArray[np.uint8], position: int) -> None:
        self.path = path
        self.size = len(data)
        self.position = position
        self.where = "the header"
        self._view = data.data

    def damaged(self, problem: str) -> ImportFailed:
        return ImportFailed(f"{self.path} is damaged: {self.where} {problem}; download it again")

    def advance(self, num_bytes: int) -> int:
        """The start of the next `num_bytes` bytes, which are known to lie in the file."""
        start = self.position
        end = start + num_bytes
        if end > self.size:
            raise ImportFailed(
                f"{self.path} is cut off or damaged: {self.where} needs {end} bytes of file, "
                f"it has {self.size}; download it again"
            )
        self.position = end
        return start

    def scalar(self, form: str) -> int | float | bool:
        start = self.advance(struct.calcsize(form))
        value: int | float | bool = struct.unpack_from(form, self._view, start)[0]
        return value

    def uint32(self) -> int:
        return int(self.scalar("<I"))

    def uint64(self) -> int:
        return int(self.scalar("<Q"))

    def count(self, what: str, min_bytes_each: int) -> int:
        """A number of things, refused if that many cannot follow in what is left of the file."""
        number = self.uint64()
        if number * min_bytes_each > self.size - self.position:
            raise ImportFailed(
                f"{self.path} is cut off or damaged: {self.where} claims {number} {what}, which "
                f"need {number * min_bytes_each} bytes or more, and {self.size - self.position} "
                "are left in the file; download it again"
            )
        return number

    def string(self) -> str:
        length = self.uint64()
        start = self.advance(length)
        return bytes(self._view[start : start + length]).decode("utf-8", "replace")

    def name(self) -> str:
        """A key or a tensor's name: short, UTF-8, not empty."""
        length = self.uint64()
        if not 0 < length <= MAX_NAME_BYTES:
            raise self.damaged(f"has a name of {length} bytes")
        start = self.advance(length)
        try:
            return bytes(self._view[start : start + length]).decode("utf-8")
        except UnicodeDecodeError as exc:
            raise self.damaged("has a name that is not UTF-8") from exc

    def strings(self, number: int) -> list[str]:
        """Like `number` calls of `string`, without their cost: vocabularies have 10^5 entries."""
        view, size, position = self._view, self.size, self.position
        unpack_length = struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(number):
            start = position + 8
            end = start + unpack_length(view, position)[0] if start <= size else start
            if end > size:
                self.advance(end - self.position)
            texts.append(bytes(view[start:end]).decode("utf-8", "replace"))
            position = end
        self.position = position
        return texts

    def numbers(self, number: int, dtype: str) -> NumberArray:
        start = self.advance(number * np.dtype(dtype).itemsize)
        return np.frombuffer(self._view, dtype=dtype, count=number, offset=start).copy()


def read_version(cursor: Cursor) -> int:
    version = cursor.uint32()
    if version in SUPPORTED_VERSIONS:
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in SUPPORTED_VERSIONS:
        raise ImportFailed(f"{cursor.path} is a big-endian GGUF; convert it to little-endian")
    raise ImportFailed(
        f"{cursor.path} is GGUF version {version}; supported are 2 and 3: "
        "download the model in a supported version"
    )


def read_metadata(cursor: Cursor, number: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(number):
        cursor.where = f"metadata entry {index} of {number}"
        key = cursor.name()
        if key in metadata:
            raise cursor.damaged(f"repeats the key {key!r}")
        cursor.where = f"metadata key {key!r}"
        metadata[key] = read_value(cursor, cursor.uint32(), depth=0)
    return metadata


def read_value(cursor: Cursor, code: int, depth: int) -> Value:
    if code == STRING_TYPE:
        return cursor.string()
    if code == ARRAY_TYPE:
        return read_array(cursor, depth + 1)
    if code not in SCALAR_FORMATS:
        raise cursor.damaged(f"has the unknown value type {code}")
    return cursor.scalar(SCALAR_FORMATS[code])


def read_array(cursor: Cursor, depth: int) -> Value:
    if depth > MAX_ARRAY_DEPTH:
        raise cursor.damaged(f"nests arrays deeper than {MAX_ARRAY_DEPTH}")
    code = cursor.uint32()
    if code == STRING_TYPE:
        return cursor.strings(cursor.count("strings", 8))
    if code == ARRAY_TYPE:
        return [read_array(cursor, depth + 1) for _ in range(cursor.count("arrays", 12))]
    if code not in ARRAY_DTYPES:
        raise cursor.damaged(f"has the unknown element type {code}")
    dtype = ARRAY_DTYPES[code]
    return cursor.numbers(cursor.count("numbers", np.dtype(dtype).itemsize), dtype)


def read_alignment(path: Path, metadata: dict[str, Value]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        isinstance(alignment, int)
        and not isinstance(alignment, bool)
        and alignment > 0
        and alignment & (alignment - 1) == 0
    ):
        return alignment
    raise ImportFailed(
        f"{path} is damaged: general.alignment is {alignment!r}, not a power of two; "
        "download it again"
    )


def read_tensors(cursor: Cursor, number: int, alignment: int) -> dict[str, TensorInfo]:
    """Positions in the file are relative until the table's end, and with it the data's begin,
    is known."""
    entries = [read_tensor_entry(cursor, index, number) for index in range(number)]
    data_start = cursor.position + (-cursor.position % alignment)
    tensors: dict[str, TensorInfo] = {}
    for name, shape, code, offset in entries:
        cursor.where = f"tensor {name!r}"
        if name in tensors:
            raise cursor.damaged("appears twice")
        if offset % alignment:
            raise cursor.damaged(f"lies at {offset}, not a multiple of the alignment {alignment}")
        num_bytes, quant_type = storage(cursor, shape, code)
        check_in_file(cursor, data_start + offset + num_bytes)
        tensors[name] = TensorInfo(name, shape, quant_type, data_start + offset, num_bytes)
    check_disjoint(cursor, tensors)
    return tensors


def read_tensor_entry(
    cursor: Cursor, index: int, number: int
) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape in numpy's order, type code, offset from the data's begin)."""
    cursor.where = f"entry {index} of the {number} in the tensor table"
    name = cursor.name()
    cursor.where = f"the table entry of tensor {name!r}"
    num_dims = cursor.uint32()
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.damaged(f"has {num_dims} dimensions")
    dims = [cursor.uint64() for _ in range(num_dims)]
    return name, tuple(reversed(dims)), cursor.uint32(), cursor.uint64()


def storage(cursor: Cursor, shape: tuple[int, ...], code: int) -> tuple[int, str]:
    """(bytes, ggml's name of the type). Python's integers do not overflow: no product is unsafe."""
    try:
        quant_type = GGMLQuantizationType(code)
    except ValueError as exc:
        raise cursor.damaged(f"has the unknown tensor type {code}") from exc
    block_size, block_bytes = GGML_QUANT_SIZES[quant_type]
    if min(shape) < 1:
        raise cursor.damaged(f"has the shape {list(shape)}")
    if shape[-1] % block_size:
        raise cursor.damaged(
            f"has rows of {shape[-1]} elements, not a multiple of {quant_type.name}'s {block_size}"
        )
    return prod(shape) // block_size * block_bytes, quant_type.name


def check_in_file(cursor: Cursor, end: int) -> None:
    if end > cursor.size:
        raise ImportFailed(
            f"{cursor.path} is cut off or damaged: {cursor.where} needs {end} bytes of file, "
            f"it has {cursor.size}; download it again"
        )


def check_disjoint(cursor: Cursor, tensors: dict[str, TensorInfo]) -> None:
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.start)
    for before, after in zip(ordered, ordered[1:], strict=False):
        if before.start + before.num_bytes > after.start:
            cursor.where = f"tensor {after.name!r}"
            raise cursor.damaged(f"overlaps tensor {before.name!r}")
