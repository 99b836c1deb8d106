"""Turns a model file into a bundle: all of it, or nothing.

The bundle is built in a temporary folder beside its destination, checked by opening it as any
user would, and renamed. What an interrupted import left is removed by the next one. Does not
know how weights are packed (`model.py`) or where models are kept (the server's model store).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from engine.bundle import (
    CHAT_TEMPLATE_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    Bundle,
    file_sha256,
)
from engine.errors import BundleError, ImportFailed
from engine.export.import_lock import import_lock
from engine.export.packing import PACKERS, Packer
from engine.importers.bert import CONFIG_FILE, POSITION_OFFSETS, BertCheckpoint, read_bert
from engine.importers.checkpoint import Checkpoint
from engine.importers.gguf import read_gguf
from engine.importers.hugging_face import read_hugging_face
from engine.importers.json_file import read_settings
from engine.importers.safetensors_reader import looks_like_safetensors
from engine.importers.source_files import is_index, source_files
from engine.importers.summary import CheckpointSummary
from engine.manifest import BundleFile, BundleSource, Manifest, encode_manifest
from engine.version import own_version

# Files up to this size have their digest recorded; larger ones only their size.
MAX_DIGESTED_BYTES = 16 << 20
# 8-bit weights with a scale of 4 bytes per 32, once for each of the two ways to compute with them,
# and room for what is small; encoders are float32.
MAX_BYTES_PER_PARAMETER = 2.4
ENCODER_BYTES_PER_PARAMETER = 4.2

OnProgress = Callable[[int, int], None]


class Written(Protocol):
    """What the writer of weights and graphs reports: file names relative to the folder."""

    @property
    def files(self) -> tuple[str, ...]: ...

    @property
    def weight_format(self) -> str: ...


WriteModel = Callable[[Checkpoint, Path, OnProgress], Written]


class Decoder(Checkpoint, Protocol):
    """A checkpoint of a model that writes text, with what people want to know of it."""

    @property
    def summary(self) -> CheckpointSummary: ...


AnyCheckpoint = Decoder | BertCheckpoint


def import_checkpoint(
    source: Path,
    destination: Path,
    name: str,
    on_progress: OnProgress,
    write_model: WriteModel | None = None,
    *,
    weight_format: str = "auto",
    packer: Packer | None = None,
) -> Bundle:
    """Imports the file `source` as the bundle folder `destination`, replacing what is there.

    `on_progress(done, total)` is called from time to time. `weight_format` is a name of
    `packing.PACKERS`, unless a `packer` of the caller's takes its place. Raises ImportFailed with
    the reason; whatever happens, `destination` is either the new bundle or what it was before.
    """
    write = write_model or decoder_writer(weight_format, packer)
    checkpoint = open_checkpoint(source)
    try:
        described = describe_source(source, checkpoint)
    except OSError as exc:
        raise ImportFailed(f"{source} cannot be read: {exc}; check the file") from exc
    return write_bundle(checkpoint, described, destination, name, on_progress, write)


def write_bundle(
    checkpoint: AnyCheckpoint,
    source: BundleSource,
    destination: Path,
    name: str,
    on_progress: OnProgress,
    write_model: WriteModel,
) -> Bundle:
    """`import_checkpoint` of what is open already. `source` says where it comes from."""
    parent = destination.parent
    staging = parent / f".importing-{destination.name}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with import_lock(parent / f".lock-{destination.name}") as waited:
            if waited and (done := same_bundle(destination, checkpoint)) is not None:
                return done
            remove_folder(staging)
            try:
                check_disk(parent, checkpoint)
                staging.mkdir()
                build_bundle(source, checkpoint, staging, name, on_progress, write_model)
                replace_folder(staging, destination)
            finally:
                remove_folder(staging)
    except OSError as exc:
        raise ImportFailed(explain_os_error(exc, destination)) from exc
    return Bundle.open(destination)


def open_checkpoint(source: Path) -> AnyCheckpoint:
    """By content: safetensors are what their config.json says, all else must be a GGUF."""
    if not is_index(source) and not looks_like_safetensors(source):
        return read_gguf(source)
    model_type = read_settings(source.parent / CONFIG_FILE).values.get("model_type")
    is_encoder = model_type in POSITION_OFFSETS and not is_index(source)
    return read_bert(source) if is_encoder else read_hugging_face(source)


def same_bundle(destination: Path, checkpoint: AnyCheckpoint) -> Bundle | None:
    """The bundle that another process made of the same file, if it is usable."""
    try:
        bundle = Bundle.open(destination)
    except BundleError:
        return None
    return bundle if bundle.source.sha256 == checkpoint.digest else None


def check_disk(folder: Path, checkpoint: AnyCheckpoint) -> None:
    is_encoder = isinstance(checkpoint, BertCheckpoint)
    per_parameter = ENCODER_BYTES_PER_PARAMETER if is_encoder else MAX_BYTES_PER_PARAMETER
    needed = int(checkpoint.summary.num_parameters * per_parameter)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ImportFailed(
            f"not enough disk space: the import needs about {needed / 1e6:,.0f} MB in {folder}, "
            f"{free / 1e6:,.0f} MB are free; make room and try again"
        )


def build_bundle(
    source: BundleSource,
    checkpoint: AnyCheckpoint,
    folder: Path,
    name: str,
    on_progress: OnProgress,
    write_model: WriteModel,
) -> None:
    """Fills the empty `folder` and checks the result. `model.json` is written last."""
    written = write_weights(checkpoint, folder, on_progress, write_model)
    files = [*written.files, TOKENIZER_FILE]
    (folder / TOKENIZER_FILE).write_bytes(checkpoint.tokenizer_json.encode("utf-8"))
    if checkpoint.chat_template is not None:
        (folder / CHAT_TEMPLATE_FILE).write_bytes(checkpoint.chat_template.encode("utf-8"))
        files.append(CHAT_TEMPLATE_FILE)
    manifest = Manifest(
        name=name,
        converter=own_version(),
        weight_format=written.weight_format,
        config=checkpoint.config,
        source=source,
        summary=checkpoint.summary,
        files=tuple(describe_file(folder, file) for file in files),
    )
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(manifest).encode("utf-8"))
    for file in (*files, MANIFEST_FILE):
        flush_to_disk(folder / file)
    Bundle.open(folder).verify()


def write_weights(
    checkpoint: AnyCheckpoint,
    folder: Path,
    on_progress: OnProgress,
    write_model: WriteModel,
) -> Written:
    if isinstance(checkpoint, BertCheckpoint):
        # Imported when it is needed: it imports onnx, which takes a while.
        from engine.export.encoder import write_encoder

        return write_encoder(checkpoint, folder, on_progress)
    return write_model(checkpoint, folder, on_progress)


def decoder_writer(weight_format: str, packer: Packer | None) -> WriteModel:
    """Raises ImportFailed for an unknown format."""
    if packer is None and weight_format not in PACKERS:
        raise ImportFailed(f"unknown weight format {weight_format!r}; known: {', '.join(PACKERS)}")
    chosen = packer or PACKERS[weight_format]

    def write(checkpoint: Checkpoint, folder: Path, on_progress: OnProgress) -> Written:
        from engine.export.model import write_model  # imports onnx

        return write_model(checkpoint, folder, on_progress, chosen)

    return write


def describe_source(source: Path, checkpoint: AnyCheckpoint) -> BundleSource:
    infos = [file.stat() for file in source_files(source)]
    return BundleSource(
        path=str(source.absolute()),
        num_bytes=sum(info.st_size for info in infos),
        modified_ns=max(info.st_mtime_ns for info in infos),
        sha256=checkpoint.digest,
    )


def describe_file(folder: Path, name: str) -> BundleFile:
    path = folder / name
    num_bytes = path.stat().st_size
    digest = file_sha256(path) if num_bytes <= MAX_DIGESTED_BYTES else None
    return BundleFile(name, num_bytes, digest)


def flush_to_disk(path: Path) -> None:
    """A rename must not become durable before the data it makes visible."""
    with path.open("r+b") as stream:
        os.fsync(stream.fileno())


def replace_folder(staging: Path, destination: Path) -> None:
    """Renames `staging` to `destination`. Folders cannot be renamed over each other (on Windows
    not even when empty), so an old bundle steps aside first and returns if that fails."""
    aside = destination.with_name(f".replaced-{destination.name}")
    remove_folder(aside)
    had_old = destination.exists()
    if had_old:
        destination.rename(aside)
    try:
        staging.rename(destination)
    except OSError:
        if had_old:
            aside.rename(destination)
        raise
    remove_folder(aside)


def remove_folder(folder: Path) -> None:
    """Removes the folder if it is there; what a running server still maps (Windows) stays for
    the next import to remove."""
    shutil.rmtree(folder, ignore_errors=True)


def explain_os_error(exc: OSError, destination: Path) -> str:
    if exc.errno == errno.ENOSPC:
        return f"the disk became full while importing to {destination}; make room and try again"
    if isinstance(exc, PermissionError):
        return (
            f"cannot write {destination}: {exc.strerror}; stop a server that uses the model and "
            "check the folder's permissions"
        )
    return f"cannot write {destination}: {exc}"
