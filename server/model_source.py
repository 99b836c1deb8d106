"""What a model is made of: the file on disk that a name, a source or a path stands for.

For verbs that start from a model's own weights instead of from a bundle. A bundle stands for the
file that it was imported from. Fetches what is not here.
"""

from __future__ import annotations

from pathlib import Path

from engine.bundle import MANIFEST_FILE, Bundle
from engine.importers.checkpoint import Checkpoint
from server.model_catalog import find_registered
from server.model_store import ModelStore, looks_like_path
from server.sources.download import fetch_registered, fetch_unregistered
from server.sources.errors import BadSource, UnknownModel
from server.sources.local import find_local_file
from server.sources.progress import Progress
from server.sources.spec import LocalSource, is_remote, parse_source


def find_bundle(store: ModelStore, text: str) -> Bundle | None:
    """The bundle that a name or a folder is; None if it is none.

    Raises BundleError when it is one and damaged.
    """
    try:
        return store.open(text)
    except UnknownModel:
        path = Path(text).expanduser()
        return Bundle.open(path) if (path / MANIFEST_FILE).is_file() else None


def source_file(store: ModelStore, text: str, progress: Progress) -> Path:
    """The path of the file or folder to import. Raises StoreError or BundleError."""
    if (registered := find_registered(text)) is not None:
        return fetch_registered(registered, store.downloads_dir, progress)
    if (bundle := find_bundle(store, text)) is not None:
        return source_of(bundle)
    if not is_remote(text) and not looks_like_path(text):
        store.find(text)  # raises: it lists what is known
    match source := parse_source(text):
        case LocalSource(path):
            return find_local_file(path)
        case _:
            return fetch_unregistered(source, store.downloads_dir, "", progress)


def source_of(bundle: Bundle) -> Path:
    """The file that a bundle was made of. Raises BadSource when it is gone."""
    path = Path(bundle.source.path)
    if not path.exists():
        raise BadSource(
            f"{path}, of which {bundle.name} was made, is gone; give the file itself instead"
        )
    return path


def open_decoder(file: Path) -> Checkpoint:
    """Raises ImportFailed, also for an embedding model."""
    from engine.errors import ImportFailed
    from engine.export.exporter import open_checkpoint
    from engine.importers.bert import BertCheckpoint

    checkpoint = open_checkpoint(file)
    if isinstance(checkpoint, BertCheckpoint):
        raise ImportFailed(f"{file} is an embedding model; only models that write text will do")
    return checkpoint
