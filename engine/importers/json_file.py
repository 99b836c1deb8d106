"""Reads the small JSON files that lie around a checkpoint's weights. Knows no key of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ImportFailed
from engine.importers.file_kind import check_regular_file
from engine.importers.gguf_metadata import Metadata

MAX_TEXT_BYTES = 64 << 20
MAX_JSON_BYTES = 16 << 20
MAX_JSON_MARKS = 1 << 20
"""Commas and opening brackets: what bounds the memory that a document takes once it is parsed."""


def read_json_file(path: Path) -> Any:
    """Raises ImportFailed: it is missing, too large or not JSON."""
    text = read_text_file(path, MAX_JSON_BYTES)
    if sum(text.count(mark) for mark in ",[{") > MAX_JSON_MARKS:
        raise ImportFailed(f"{path} has more entries than such a file can need")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ImportFailed(f"{path} is not valid JSON; download it again") from exc


def read_text_file(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Raises ImportFailed: it is missing, too large or not UTF-8."""
    if (num_bytes := check_regular_file(path)) > max_bytes:
        raise ImportFailed(f"{path} has {num_bytes} bytes, more than such a file can need")
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ImportFailed(f"{path} cannot be read as text: {exc}; download it again") from exc


def read_settings(path: Path) -> Metadata:
    """The plain values of a JSON object, for checked reading; nulls count as absent."""
    return plain_settings(path, read_object(path))


def read_object(path: Path) -> dict[str, Any]:
    """Raises ImportFailed when the file is not a JSON object."""
    document = read_json_file(path)
    if not isinstance(document, dict):
        raise ImportFailed(f"{path} is not a JSON object; download it again")
    return document


def plain_settings(path: Path, document: Mapping[str, object]) -> Metadata:
    """The plain values of an object that was read from `path`."""
    plain = {k: v for k, v in document.items() if isinstance(v, str | int | float | bool)}
    return Metadata(path, plain)


def read_optional_settings(path: Path) -> Metadata:
    """The same; a file that is not there has no values."""
    return read_settings(path) if path.exists() else Metadata(path, {})
