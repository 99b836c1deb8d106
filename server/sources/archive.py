"""Takes one file out of a wheel (a zip archive), and only that one.

The names inside an archive are data: none of them ever becomes a path. The file goes where the
caller says, its size is bounded by what the archive declares, and members that are links or
whose names try to leave the archive are refused.
"""

from __future__ import annotations

import re
import shutil
import stat
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

from server.sources.errors import BadSource, DiskFull, FetchFailed
from server.sources.progress import Progress

CHUNK_BYTES = 1 << 20
_DRIVE = re.compile(r"[A-Za-z]:")


def extract_member(archive: Path, member: str | None, target: Path, progress: Progress) -> None:
    """Writes `member` (None: the only .gguf) to `target`, replacing it.

    Raises BadSource when the archive does not hold it, FetchFailed when the archive is damaged.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            info = find_member(opened, archive.name, member)
            check_space(target.parent, info.file_size)
            with opened.open(info) as source, target.open("wb") as sink:
                copy(source, sink, info, progress)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as exc:
        raise FetchFailed(f"{archive.name} is a damaged archive ({exc}); pull it again") from exc


def find_member(archive: zipfile.ZipFile, name: str, member: str | None) -> zipfile.ZipInfo:
    if member is None:
        infos = [info for info in archive.infolist() if info.filename.lower().endswith(".gguf")]
        if len(infos) != 1:
            raise BadSource(f"{name} holds {len(infos)} .gguf files, expected one")
    else:
        infos = [info for info in archive.infolist() if info.filename == member]
        if len(infos) != 1:
            raise BadSource(f"{name} holds {len(infos)} files named {member!r}, expected one")
    check_member(infos[0], name)
    return infos[0]


def check_member(info: zipfile.ZipInfo, archive_name: str) -> None:
    """Refuses a member that could stand for anything but a plain file inside the archive."""
    # `orig_filename` is what the archive says; zipfile cuts `filename` at a NUL.
    name = info.orig_filename
    mode = info.external_attr >> 16
    is_plain = stat.S_IFMT(mode) in (0, stat.S_IFREG) and not info.is_dir()
    parts = name.replace("\\", "/").split("/")
    leaves = "\0" in name or name.startswith(("/", "\\")) or ".." in parts or _DRIVE.match(name)
    if leaves or not is_plain:
        raise BadSource(f"{archive_name} holds an unsafe member {name!r}; do not use this archive")


def copy(source: object, sink: BinaryIO, info: zipfile.ZipInfo, progress: Progress) -> None:
    """At most the declared size, so that a lying archive cannot fill the disk."""
    reader: BinaryIO = source  # type: ignore[assignment]
    done = 0
    while chunk := reader.read(CHUNK_BYTES):
        done += len(chunk)
        if done > info.file_size:
            raise FetchFailed(f"{info.filename} is larger than its archive says; pull it again")
        sink.write(chunk)
        progress("unpack", done, info.file_size)
    if done != info.file_size:
        raise FetchFailed(f"{info.filename} is smaller than its archive says; pull it again")


def check_space(folder: Path, num_bytes: int) -> None:
    """Raises DiskFull with the numbers."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise DiskFull(
            f"not enough disk space: {num_bytes / 1e6:,.0f} MB are needed in {folder}, "
            f"{free / 1e6:,.0f} MB are free; make room and try again"
        )
