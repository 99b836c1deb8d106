"""The text of a bundle's `model.json`: written by the exporter, read and checked by `Bundle`.

Knows the fields and their types, not the disk. Anything that does not fit is a ValueError with
half a sentence; who knows the folder turns it into a BundleError.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, TypeVar

from engine.architectures.config import ModelConfig
from engine.architectures.encoder import EncoderConfig
from engine.importers.summary import CheckpointSummary

# Raise it whenever what the exporter writes changes in a way that the engine must notice.
BUNDLE_FORMAT = 1

SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
SHA256 = re.compile(r"[0-9a-f]{64}")


class ModelKind(StrEnum):
    """What a model does: it writes text, or it turns texts into vectors."""

    GENERATION = "generation"
    EMBEDDING = "embedding"


@dataclass(frozen=True, slots=True)
class BundleFile:
    """`sha256` is None for the big files, whose size alone is recorded."""

    name: str
    num_bytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class BundleSource:
    """The file that was imported, so that a change of it is noticed. `modified_ns` is its mtime."""

    path: str
    num_bytes: int
    modified_ns: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """`converter` is the version of hexlm that wrote the bundle. `config` says its kind."""

    name: str
    converter: str
    weight_format: str
    config: ModelConfig | EncoderConfig
    source: BundleSource
    summary: CheckpointSummary
    files: tuple[BundleFile, ...]

    @property
    def kind(self) -> ModelKind:
        is_encoder = isinstance(self.config, EncoderConfig)
        return ModelKind.EMBEDDING if is_encoder else ModelKind.GENERATION


Record = TypeVar("Record", ModelConfig, EncoderConfig, BundleSource, CheckpointSummary, BundleFile)


def encode_manifest(manifest: Manifest) -> str:
    head = {"format": BUNDLE_FORMAT, "kind": manifest.kind}
    return json.dumps({**head, **asdict(manifest)}, indent=1)


def decode_manifest(text: str) -> Manifest:
    """Raises ValueError saying what is wrong; the file names it returns are safe to join."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ValueError("its model.json is not valid JSON") from exc
    if not isinstance(document, dict) or "format" not in document:
        raise ValueError("its model.json is not one of ours")
    if document["format"] != BUNDLE_FORMAT:
        raise ValueError(
            f"it has the format {document['format']}, this version of hexlm reads {BUNDLE_FORMAT}"
        )
    return Manifest(
        name=_read(document, "name", "str"),
        converter=_read(document, "converter", "str"),
        weight_format=_read(document, "weight_format", "str"),
        config=_decode_config(document),
        source=_decode(BundleSource, document.get("source")),
        summary=_decode(CheckpointSummary, document.get("summary")),
        files=tuple(_decode_file(item) for item in _read(document, "files", "list")),
    )


def _decode_config(document: Mapping[str, Any]) -> ModelConfig | EncoderConfig:
    """Bundles that do not say their kind are older than the second one."""
    match document.get("kind", ModelKind.GENERATION):
        case ModelKind.GENERATION:
            return _decode(ModelConfig, document.get("config"))
        case ModelKind.EMBEDDING:
            return _decode_encoder(document.get("config"))
        case kind:
            raise ValueError(f"its model.json has the unknown kind {str(kind)[:40]!r}")


def _decode_encoder(item: object) -> EncoderConfig:
    config = _decode(EncoderConfig, item)
    if not config.num_heads or config.hidden_size % config.num_heads or not config.context_length:
        raise ValueError("its model.json has numbers that do not fit together")
    return config


def _decode_file(item: object) -> BundleFile:
    file = _decode(BundleFile, item)
    if not SAFE_NAME.fullmatch(file.name):
        raise ValueError(f"its model.json lists the file name {file.name!r}")
    if file.sha256 is not None and not SHA256.fullmatch(file.sha256):
        raise ValueError(f"its model.json has a wrong digest for {file.name}")
    return file


def _decode(kind: type[Record], item: object) -> Record:
    """A dataclass of plain values, each checked against its annotation."""
    if not isinstance(item, dict):
        raise ValueError("its model.json is incomplete")
    fields = dataclasses.fields(kind)
    return kind(**{field.name: _read(item, field.name, str(field.type)) for field in fields})


def _read(document: Mapping[str, Any], key: str, annotation: str) -> Any:
    value = document.get(key)
    if annotation == "tuple[int, ...]":
        value = tuple(value) if isinstance(value, list) else value
    if not _fits(value, annotation):
        raise ValueError(f"its model.json has the wrong value {value!r} for {key!r}")
    return value


def _fits(value: object, annotation: str) -> bool:
    match annotation:
        case "int":
            return isinstance(value, int) and not isinstance(value, bool) and value >= 0
        case "float":
            return isinstance(value, float)
        case "bool":
            return isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "list":
            return isinstance(value, list)
        case "tuple[int, ...]":
            return isinstance(value, tuple) and all(_fits(item, "int") for item in value)
        case "int | None" | "str | None":
            return value is None or _fits(value, annotation.removesuffix(" | None"))
    raise AssertionError(f"no check for values of type {annotation}")
