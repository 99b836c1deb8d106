"""A GGUF that was split into several files, read as one.

llama.cpp's naming: `name-00001-of-00003.gguf`. The first part has all metadata; every part says
which one it is and how many there are (`split.no`, `split.count`), which is compared with the
names before anything is believed. Any part may be given.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import ImportFailed
from engine.importers.gguf_metadata import Metadata
from engine.importers.gguf_reader import GgufFile, TensorInfo, open_gguf
from engine.importers.source_files import MAX_PARTS, split_parts


def open_whole_gguf(path: Path) -> GgufFile:
    """Raises ImportFailed: a part is missing, or they do not belong together."""
    paths = split_parts(path)
    if len(paths) == 1:
        file = open_gguf(path)
        count = Metadata(path, file.metadata).integer("split.count", 0, MAX_PARTS, default=0)
        if count > 1:
            raise ImportFailed(
                f"{path} is one of {count} parts of a split GGUF, but not named like one; "
                "give the parts their names back (…-00001-of-0000N.gguf)"
            )
        return file
    for part in paths:
        if not part.exists():
            raise ImportFailed(f"{part} is missing, one of {len(paths)} parts; download it")
    return _merged([open_gguf(part) for part in paths])


def _merged(files: list[GgufFile]) -> GgufFile:
    tensors: dict[str, TensorInfo] = {}
    for number, file in enumerate(files):
        metadata = Metadata(file.path, file.metadata)
        said = [metadata.integer(key, 0, MAX_PARTS) for key in ("split.no", "split.count")]
        if said != [number, len(files)]:
            raise ImportFailed(
                f"{file.path} says that it is part {said[0] + 1} of {said[1]}, its name says "
                f"{number + 1} of {len(files)}; download it again"
            )
        for info in file.tensors.values():
            if info.name in tensors:
                raise ImportFailed(
                    f"{file.path}: tensor {info.name!r} is in two parts; download them again"
                )
            tensors[info.name] = TensorInfo(
                info.name, info.shape, info.quant_type, info.start, info.num_bytes, part=number
            )
    first = files[0]
    expected = Metadata(first.path, first.metadata).integer(
        "split.tensors.count", 0, 1 << 31, default=len(tensors)
    )
    if expected != len(tensors):
        raise ImportFailed(
            f"{first.path}: its {len(files)} parts hold {len(tensors)} tensors, not {expected}; "
            "download them again"
        )
    return GgufFile(
        path=first.path,
        version=first.version,
        metadata=first.metadata,
        tensors=tensors,
        data=first.data,
        more_data=tuple(file.data for file in files[1:]),
    )
