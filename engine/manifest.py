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
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from engine.architectures.config import ModelConfig
from engine.architectures.encoder import EncoderConfig
from engine.importers.summary import CheckpointSummary

# Raise it whenever what the exporter writes changes in a way that the engine must notice.
BUNDLE_FORMAT = 2

SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
SHA256 = re.compile(r"[0-9a-f]{64}")


class ModelKind(StrEnum):
    """What a model does: it writes text, turns texts into vectors, or scores pairs of texts."""

    GENERATION = "generation"
    EMBEDDING = "embedding"
    RERANK = "rerank"


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
        if not isinstance(self.config, EncoderConfig):
            return ModelKind.GENERATION
        return ModelKind.RERANK if self.config.is_cross_encoder else ModelKind.EMBEDDING


Record = TypeVar("Record")


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
        name=_read(document, "name", str),
        converter=_read(document, "converter", str),
        weight_format=_read(document, "weight_format", str),
        config=_decode_config(document),
        source=_decode(BundleSource, document.get("source")),
        summary=_decode(CheckpointSummary, document.get("summary")),
        files=_read(document, "files", tuple[BundleFile, ...]),
    )


def _decode_config(document: Mapping[str, Any]) -> ModelConfig | EncoderConfig:
    """Bundles that do not say their kind are older than the second one."""
    match document.get("kind", ModelKind.GENERATION):
        case ModelKind.GENERATION:
            return _decode_decoder(document.get("config"))
        case ModelKind.EMBEDDING | ModelKind.RERANK:
            return _decode_encoder(document.get("config"))
        case kind:
            raise ValueError(f"its model.json has the unknown kind {str(kind)[:40]!r}")


def _decode_decoder(item: object) -> ModelConfig:
    config = _decode(ModelConfig, item)
    fits_together = (
        config.layers
        and 0 < config.num_kv_heads <= config.num_heads
        and not config.num_heads % config.num_kv_heads
        and all(layer.rope < len(config.ropes) for layer in config.layers)
        and all(rope.rotary_size <= config.head_size for rope in config.ropes)
    )
    if not fits_together or not config.context_length:
        raise ValueError("its model.json has numbers that do not fit together")
    return config


def _decode_encoder(item: object) -> EncoderConfig:
    config = _decode(EncoderConfig, item)
    if not config.num_heads or config.hidden_size % config.num_heads or not config.context_length:
        raise ValueError("its model.json has numbers that do not fit together")
    return config


def _decode(kind: type[Record], item: object) -> Record:
    """A dataclass of plain values, or of other such dataclasses, each checked against its type."""
    if not isinstance(item, dict):
        raise ValueError("its model.json is incomplete")
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    record = kind(**{name: _read(item, name, hints[name]) for name in names})
    if isinstance(record, BundleFile):
        _check_file(record)
    return record


def _check_file(file: BundleFile) -> None:
    if not SAFE_NAME.fullmatch(file.name):
        raise ValueError(f"its model.json lists the file name {file.name!r}")
    if file.sha256 is not None and not SHA256.fullmatch(file.sha256):
        raise ValueError(f"its model.json has a wrong digest for {file.name}")


def _read(document: Mapping[str, Any], key: str, kind: Any) -> Any:
    return _value(document.get(key), key, kind)


def _value(value: object, key: str, kind: Any) -> Any:
    """`value` as the annotation `kind` says. Lists of JSON become tuples."""
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise _wrong_value(value, key)
        return tuple(_value(item, key, get_args(kind)[0]) for item in value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode(kind, value)
    if isinstance(kind, UnionType):
        return None if value is None else _value(value, key, get_args(kind)[0])
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _wrong_value(value, key)
    if isinstance(value, int) and value < 0:
        raise _wrong_value(value, key)
    return value


def _wrong_value(value: object, key: str) -> ValueError:
    return ValueError(f"its model.json has the wrong value {repr(value)[:80]} for {key!r}")
