"""Opens what a user gave as a model file, and says in words what it is when it is not one.

Decides by content, never by the file's name. Knows first bytes only: the containers themselves
are read elsewhere. Pipes, devices and folders are recognised before anything is opened, since
opening a pipe blocks.
"""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.errors import ImportFailed

GGUF_MAGIC = b"GGUF"
HEAD_BYTES = 512

FOREIGN_MAGICS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself; run `git lfs pull`"),
    (b"FUGG", "a big-endian GGUF; convert it to little-endian"),
    (b"PK\x03\x04", "a zip archive; unpack it and give the .gguf inside"),
    (b"\x1f\x8b", "a gzip archive; unpack it and give the .gguf inside"),
    (b"tjgg", "an old GGML file (before GGUF); download a GGUF version of the model"),
    (b"lmgg", "an old GGML file (before GGUF); download a GGUF version of the model"),
    (b"fmgg", "an old GGML file (before GGUF); download a GGUF version of the model"),
)


def map_regular_file(path: Path) -> NDArray[np.uint8]:
    """The bytes of `path`, read-only and mapped, not read. Raises ImportFailed if it is not a
    readable, non-empty regular file; the message says what it is and what to do."""
    size = check_regular_file(path)
    if size == 0:
        raise ImportFailed(f"{path} is an empty file; download it again")
    try:
        return np.memmap(path, dtype=np.uint8, mode="r", shape=(size,))
    except (OSError, ValueError) as exc:
        raise ImportFailed(f"{path} cannot be read: {exc}") from exc


def check_regular_file(path: Path) -> int:
    """The size in bytes. Opens nothing."""
    try:
        info = path.stat()
    except FileNotFoundError as exc:
        if path.is_symlink():
            raise ImportFailed(
                f"{path} is a symbolic link to a file that does not exist; download it again"
            ) from exc
        raise ImportFailed(f"{path} does not exist; check the path") from exc
    except (OSError, ValueError) as exc:
        raise ImportFailed(f"{path} cannot be read: {exc}") from exc
    if stat.S_ISDIR(info.st_mode):
        raise ImportFailed(f"{path} is a directory; give the model file inside it")
    if not stat.S_ISREG(info.st_mode):
        raise ImportFailed(f"{path} is a pipe or a device, not a file; save the model to a file")
    return info.st_size


def describe_foreign(head: bytes) -> str:
    """What a file that does not begin with GGUF's magic is, from its first `HEAD_BYTES` bytes:
    a noun phrase and what to do."""
    for magic, description in FOREIGN_MAGICS:
        if head.startswith(magic):
            return description
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return "an HTML page (a login or error page saved as a file?); download it again"
    if text.startswith(b"<?xml"):
        return "an XML document (an error answer saved as a file?); download it again"
    if len(head) > 8 and head[8:9] == b"{":
        return "a safetensors file, which cannot be imported yet; give a GGUF file"
    if text.startswith((b"{", b"[")):
        return "a JSON document, not a model; download it again"
    if GGUF_MAGIC.startswith(head):
        return f"only {len(head)} bytes long; download it again"
    return "not a GGUF file; give a file in GGUF format"
