"""A bundle: the folder that an import leaves, opened and checked.

Opening reads `model.json` and compares sizes, which takes milliseconds and catches what
interrupted writes and full disks leave behind; `verify` compares the digests too. Does not know
what is inside the graphs and the weights.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from engine.architectures.config import ModelConfig
from engine.architectures.encoder import EncoderConfig
from engine.errors import BundleError
from engine.importers.summary import CheckpointSummary
from engine.manifest import BundleFile, BundleSource, Manifest, ModelKind, decode_manifest

MANIFEST_FILE = "model.json"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
WEIGHTS_FILE = "weights.bin"
ENCODER_FILE = "encoder.onnx"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle whose files were there, with the right sizes, when it was opened."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> Bundle:
        """Raises BundleError with the reason and the command that mends it."""
        manifest = read_manifest(folder)
        bundle = cls(folder, manifest)
        listed = {file.name for file in manifest.files}
        graphs = (ENCODER_FILE,) if manifest.kind is ModelKind.EMBEDDING else ()
        for required in (TOKENIZER_FILE, WEIGHTS_FILE, *graphs):
            if required not in listed:
                raise bundle.damaged(f"its model.json does not list {required}")
        for file in manifest.files:
            bundle._check_size(file)
        return bundle

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def kind(self) -> ModelKind:
        return self.manifest.kind

    @property
    def config(self) -> ModelConfig:
        """Of a model that writes text. Raises BundleError for any other."""
        if not isinstance(self.manifest.config, ModelConfig):
            raise BundleError(f"{self.name} is an embedding model; it cannot write text")
        return self.manifest.config

    @property
    def encoder_config(self) -> EncoderConfig:
        """Of an embedding model. Raises BundleError for any other."""
        if not isinstance(self.manifest.config, EncoderConfig):
            raise BundleError(f"{self.name} is no embedding model; it writes text")
        return self.manifest.config

    @property
    def weight_format(self) -> str:
        return self.manifest.weight_format

    @property
    def source(self) -> BundleSource:
        return self.manifest.source

    @property
    def summary(self) -> CheckpointSummary:
        return self.manifest.summary

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER_FILE

    @property
    def weights_path(self) -> Path:
        return self.path / WEIGHTS_FILE

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.manifest.files)

    @property
    def chat_template(self) -> str | None:
        """The text of the model's own template, read from its file; None if it has none."""
        if all(file.name != CHAT_TEMPLATE_FILE for file in self.manifest.files):
            return None
        return (self.path / CHAT_TEMPLATE_FILE).read_bytes().decode("utf-8")

    def damaged(self, reason: str) -> BundleError:
        return BundleError(bundle_problem(self.path, self.name, reason))

    def verify(self) -> None:
        """Compares every recorded digest. Raises BundleError naming the first file that differs."""
        for file in self.manifest.files:
            self._check_size(file)
            if file.sha256 is not None and file_sha256(self.path / file.name) != file.sha256:
                raise self.damaged(f"{file.name} has changed since the import")

    def _check_size(self, file: BundleFile) -> None:
        try:
            num_bytes = (self.path / file.name).stat().st_size
        except OSError as exc:
            raise self.damaged(f"{file.name} is missing") from exc
        if num_bytes != file.num_bytes:
            raise self.damaged(f"{file.name} has {num_bytes} bytes instead of {file.num_bytes}")


def read_manifest(folder: Path) -> Manifest:
    """Only `model.json`, without a look at the other files. Raises BundleError."""
    try:
        text = (folder / MANIFEST_FILE).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = "it has no readable model.json"
        raise BundleError(bundle_problem(folder, folder.name, reason)) from exc
    try:
        return decode_manifest(text)
    except ValueError as exc:
        raise BundleError(bundle_problem(folder, folder.name, str(exc))) from exc


def bundle_problem(folder: Path, name: str, reason: str) -> str:
    return f"{folder} is not a usable bundle: {reason}; run `hexlm pull {name} --force`"


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
