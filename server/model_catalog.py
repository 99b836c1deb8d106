"""The registered models: names that `pull` and `serve` understand, from `configs/models/*.toml`.

Data that ships with the program, so a wrong entry is a programmer's error found by a test. Also
the one place that says what a model's name may look like.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from server.sources.errors import BadModelName
from server.sources.local import INDEX_FILE, SAFETENSORS_FILE
from server.sources.spec import PypiSource, Source, parse_source

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_PART = re.compile(r"(?i)-\d{5}-of-\d{5}(?=\.gguf$)")
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """`sha256` and `size_bytes` are those of the model file.

    `companions`: files that belong to it, by their path relative to its folder, with their SHA-256.
    `parts`: wheels that each hold a piece of the file, in order; empty when one holds it whole.
    `tool_parser` and `reasoning_parser` as in `output_format.py`; None leaves it to the template.
    """

    name: str
    source: str
    file: str | None
    sha256: str
    size_bytes: int
    licence: str
    description: str
    aliases: tuple[str, ...]
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    companions: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[PypiSource, ...] = ()

    def parsed_source(self) -> Source:
        return parse_source(self.source, self.file)


def read_catalog() -> tuple[RegisteredModel, ...]:
    """Every registered model, by name."""
    folder = resources.files("configs").joinpath("models")
    texts = [item.read_text("utf-8") for item in folder.iterdir() if item.name.endswith(".toml")]
    return tuple(sorted(map(parse_entry, texts), key=lambda model: model.name))


def parse_entry(text: str) -> RegisteredModel:
    """Unknown and missing keys are errors (TypeError)."""
    values = tomllib.loads(text)
    values["aliases"] = tuple(values.get("aliases", ()))
    values.setdefault("file", None)
    values["parts"] = tuple(parse_part(**part) for part in values.get("parts", ()))
    return RegisteredModel(**values)


def parse_part(source: str, file: str) -> PypiSource:
    part = parse_source(source, file)
    if not isinstance(part, PypiSource):
        raise TypeError(f"{source} is not a wheel")
    return part


def find_registered(name: str) -> RegisteredModel | None:
    """By name or alias, whatever the case of the letters."""
    wanted = name.lower()
    for model in read_catalog():
        if wanted == model.name or wanted in model.aliases:
            return model
    return None


def check_name(name: str) -> str:
    """The name, if it can be a folder's name on every system. Raises BadModelName."""
    if not _NAME.fullmatch(name) or _RESERVED.fullmatch(name) or name.endswith("."):
        raise BadModelName(
            f"{name!r} cannot be a model's name; use letters, digits, '.', '_' and '-', "
            "not beginning with a dot"
        )
    return name


def name_of_file(path: Path) -> str:
    """A name for a file that was given without one; weights that are called as in every model
    are named after their folder, and parts of a split file after the whole."""
    if path.name.lower() in (SAFETENSORS_FILE, INDEX_FILE):
        return name_from_file(name_of_folder(path.absolute().parent))
    return name_from_file(_PART.sub("", path.name))


def name_of_folder(folder: Path) -> str:
    """Hugging Face's cache keeps a model in `models--owner--name/snapshots/<commit>`."""
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return folder.name


def name_from_file(file_name: str) -> str:
    """A name from a file's: its stem, in allowed characters."""
    stem = re.sub(r"(?i)\.(gguf|safetensors)$", "", file_name)
    return check_name(re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-").lower() or "model")
