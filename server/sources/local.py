"""Finds the model file that a local path means: the file itself, or the one in a folder.

That is the only .gguf (all parts of a split one count as one), or else the safetensors: their
index, or the only file.
"""

from __future__ import annotations

from pathlib import Path

from engine.importers.source_files import split_parts
from server.sources.errors import BadSource

SAFETENSORS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")


def find_local_file(path: Path) -> Path:
    """Raises BadSource. Whether the file is a model is the importer's question, not ours."""
    if not path.is_dir():
        return path
    try:
        names = sorted(item.name for item in path.iterdir())
    except OSError as exc:
        raise BadSource(f"cannot read the folder {path}: {exc.strerror}") from exc
    models = whole_ggufs([path / name for name in names])
    if not models and (safetensors := find_safetensors(names)) is not None:
        return path / safetensors
    if len(models) != 1:
        raise BadSource(describe_choice(path, models, names))
    return models[0]


def whole_ggufs(paths: list[Path]) -> list[Path]:
    """The .gguf files, the first part standing for all of a split one."""
    ggufs = [path for path in paths if path.name.lower().endswith(".gguf")]
    return sorted({split_parts(path)[0] for path in ggufs})


def find_safetensors(names: list[str]) -> str | None:
    """The index, else the weights under their usual name, else the only ones."""
    for name in (INDEX_FILE, SAFETENSORS_FILE):
        if name in names:
            return name
    others = [name for name in names if name.lower().endswith(".safetensors")]
    return others[0] if len(others) == 1 else None


def describe_choice(path: Path, models: list[Path], names: list[str]) -> str:
    listed = ": " + ", ".join(file.name for file in models[:5]) if models else ""
    pickled = [name for name in names if name.lower().endswith(PICKLE_SUFFIXES)]
    if pickled and not models:
        return (
            f"{path} holds its weights as {pickled[0]}, which can run code when it is read; "
            "convert the model to safetensors or GGUF"
        )
    return f"{path} holds {len(models)} .gguf files{listed}; give the path of one .gguf file"
