"""Reads a safetensors file: the checked table of its tensors, and their values as float32.

The format: 8 bytes with the length of the header, the header as JSON, then the tensors' bytes.
The header is data of strangers: every number in it is compared with the file before it is used.
Knows no model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ImportFailed
from engine.importers.file_kind import check_regular_file, map_regular_file

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 << 20
"""A shard with 100,000 tensors has 12 MB; the format's own library stops at 100 MB."""

MAX_HEADER_MARKS = 1 << 20
"""Commas and opening brackets, of which a tensor has about seven: what bounds the memory that a
header takes once it is parsed."""

MAX_DIMENSIONS = 8
MAX_NAME_CHARS = 512
ITEM_BYTES = MappingProxyType(
    {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
    | {"BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "U32": 4, "U64": 8}
)
_FLOATS = MappingProxyType({"F64": "<f8", "F32": "<f4", "F16": "<f2"})
_INTEGERS = MappingProxyType({"I8": "i1", "U8": "u1", "I32": "<i4", "U32": "<u4", "I64": "<i8"})


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: `begin` and `end` in bytes from the start of the tensors' bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """`data` are the tensors' bytes, mapped and not read."""

    path: Path
    entries: dict[str, TensorEntry]
    data: NDArray[np.uint8]

    def read(self, entry: TensorEntry) -> NDArray[np.float32]:
        """The tensor in its shape. Raises ImportFailed for a storage that holds no plain floats."""
        return self.read_rows(entry, 0, entry.shape[0] if entry.shape else 1).reshape(entry.shape)

    def read_rows(self, entry: TensorEntry, start: int, stop: int) -> NDArray[np.float32]:
        """Entries start..stop of the tensor's first dimension, with their other dimensions."""
        self.check_floats(entry)
        raw = self.raw_rows(entry, start, stop)
        if entry.dtype == "BF16":
            high_halves = np.frombuffer(raw.tobytes(), "<u2").astype(np.uint32)
            values = (high_halves << np.uint32(16)).view(np.float32)
        else:
            values = np.frombuffer(raw.tobytes(), _FLOATS[entry.dtype]).astype(np.float32)
        return values.reshape(stop - start, *entry.shape[1:])

    def raw_rows(self, entry: TensorEntry, start: int, stop: int) -> NDArray[np.uint8]:
        """[rows, bytes of a row], a view of the mapped file."""
        num_rows = entry.shape[0] if entry.shape else 1
        row_bytes = (entry.end - entry.begin) // max(num_rows, 1)
        begin = entry.begin + start * row_bytes
        end = begin + (stop - start) * row_bytes
        return self.data[begin:end].reshape(stop - start, row_bytes)

    def read_integers(self, entry: TensorEntry) -> NDArray[np.integer]:
        """A view of the mapped tensor in its shape, not necessarily aligned.

        Raises ImportFailed for anything but integers of 8, 32 and 64 bits.
        """
        if entry.dtype not in _INTEGERS:
            raise ImportFailed(
                f"{self.path}: tensor {entry.name!r} is stored as {entry.dtype}; "
                f"expected one of {', '.join(_INTEGERS)}"
            )
        raw = self.data[entry.begin : entry.end]
        return raw.view(_INTEGERS[entry.dtype]).reshape(entry.shape)

    def check_floats(self, entry: TensorEntry) -> None:
        if entry.dtype not in (*_FLOATS, "BF16"):
            raise ImportFailed(
                f"{self.path}: tensor {entry.name!r} is stored as {entry.dtype}; "
                f"supported: {', '.join((*_FLOATS, 'BF16'))}"
            )


def looks_like_safetensors(path: Path) -> bool:
    """By content: a header's length that fits the file, and the header's first brace.

    False too for what is no readable file: whoever opens it next says what is wrong with it.
    """
    try:
        size = check_regular_file(path)
        with path.open("rb") as stream:
            head = stream.read(LENGTH_BYTES + 1)
    except (ImportFailed, OSError):
        return False
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    return head[LENGTH_BYTES:] == b"{" and (length <= size or path.suffix == ".safetensors")


def open_safetensors(path: Path) -> SafetensorsFile:
    """Raises ImportFailed that says what is wrong with the file."""
    data = map_regular_file(path)
    length = int.from_bytes(data[:LENGTH_BYTES].tobytes(), "little")
    if len(data) < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, len(data) - LENGTH_BYTES):
        raise _damaged(path, f"its header of {length} bytes does not fit into {len(data)} bytes")
    header = _read_header(path, data[LENGTH_BYTES : LENGTH_BYTES + length].tobytes())
    header.pop("__metadata__", None)
    tensors = data[LENGTH_BYTES + length :]
    entries = {name: _read_entry(path, name, item) for name, item in header.items()}
    _check_layout(path, list(entries.values()), len(tensors))
    return SafetensorsFile(path, entries, tensors)


def _read_header(path: Path, text: bytes) -> dict[str, Any]:
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > MAX_HEADER_MARKS:
        raise _damaged(path, "its header has more entries than a model can have tensors")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
    except _RepeatedKey as exc:
        raise _damaged(path, f"its header names {exc.args[0][:60]!r} twice") from exc
    except (ValueError, RecursionError) as exc:
        raise _damaged(path, "its header is not valid JSON") from exc
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    return header


class _RepeatedKey(Exception):
    """A JSON object with the same key twice; the key."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _RepeatedKey(key)
        found[key] = value
    return found


def _read_entry(path: Path, name: str, item: object) -> TensorEntry:
    if not isinstance(item, dict) or len(name) > MAX_NAME_CHARS:
        raise _damaged(path, f"its header describes the tensor {name[:60]!r} wrongly")
    dtype, shape, offsets = item.get("dtype"), _sizes(item, "shape"), _sizes(item, "data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ImportFailed(f"{path}: tensor {name!r} has the unknown storage {str(dtype)[:40]!r}")
    if shape is None or offsets is None or len(shape) > MAX_DIMENSIONS or len(offsets) != 2:
        raise _damaged(path, f"its header describes the tensor {name!r} wrongly")
    return TensorEntry(name, dtype, shape, *offsets)


def _sizes(item: dict[str, Any], key: str) -> tuple[int, ...] | None:
    """A list of whole numbers; None for anything else."""
    value = item.get(key)
    if not isinstance(value, list):
        return None
    is_right = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)
    return tuple(value) if is_right else None


def _check_layout(path: Path, entries: list[TensorEntry], num_bytes: int) -> None:
    """Every tensor has the bytes of its shape, none shares a byte, and the file ends with them."""
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.end - entry.begin != prod(entry.shape) * ITEM_BYTES[entry.dtype]:
            raise _damaged(path, f"tensor {entry.name!r} has the wrong number of bytes")
        if entry.begin != position:
            raise _damaged(path, f"tensor {entry.name!r} does not follow the one before it")
        position = entry.end
    if position != num_bytes:
        raise _damaged(path, f"it has {num_bytes} bytes of tensors instead of {position}")


def _damaged(path: Path, reason: str) -> ImportFailed:
    return ImportFailed(f"{path} is not a whole safetensors file: {reason}; download it again")
