"""Which files a model is made of, and one digest over them. Reads names and bytes, no contents."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

INDEX_SUFFIX = ".safetensors.index.json"
MAX_PARTS = 4096
_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)

TEXT_FILES = (
    "config.json", "generation_config.json", "quantize_config.json", "quant_config.json",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""What lies around safetensors weights and is part of the model; relative to their folder."""


def source_files(path: Path) -> tuple[Path, ...]:
    """Of the model that is given as the file `path`: a GGUF or one of its parts, a safetensors
    file, or the index of several. Files that are not there are left out."""
    if path.suffix.lower() == ".gguf":
        files = split_parts(path)
    else:
        folder = path.parent
        texts = (folder / name for name in TEXT_FILES)
        shards = sorted(folder.glob("*.safetensors")) if is_index(path) else []
        files = (path, *texts, *shards)
    return tuple(file for file in files if file == path or file.is_file())


def split_parts(path: Path) -> tuple[Path, ...]:
    """All files of the model that `path` is a part of, in order, by the names alone; (path,) for
    one that is whole. Looks at no file."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    count = min(int(match["count"]), MAX_PARTS)
    suffix = path.suffix
    names = (f"{match['stem']}-{n:05}-of-{match['count']}{suffix}" for n in range(1, count + 1))
    return tuple(path.with_name(name) for name in names)


def is_index(path: Path) -> bool:
    """Whether the file lists the shards of a model in safetensors."""
    return path.name.endswith(INDEX_SUFFIX)


def files_digest(files: Sequence[Path]) -> str:
    """SHA-256 in hex: of a lone file its own, of several one over their names and digests."""
    if len(files) == 1:
        return file_digest(files[0])
    lines = (f"{file.name} {file_digest(file)}\n" for file in files)
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()


def file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
