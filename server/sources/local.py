"""Finds the model file that a local path means: the file itself, or the one in a folder.

That is the only .gguf, or else the weights of an embedding model, model.safetensors.
"""

from __future__ import annotations

from pathlib import Path

from server.sources.errors import BadSource

SAFETENSORS_FILE = "model.safetensors"


def find_local_file(path: Path) -> Path:
    """Raises BadSource. Whether the file is a model is the importer's question, not ours."""
    if not path.is_dir():
        return path
    try:
        files = sorted(item for item in path.iterdir() if item.name.lower().endswith(".gguf"))
    except OSError as exc:
        raise BadSource(f"cannot read the folder {path}: {exc.strerror}") from exc
    if not files and (path / SAFETENSORS_FILE).is_file():
        return path / SAFETENSORS_FILE
    if len(files) != 1:
        names = ": " + ", ".join(file.name for file in files[:5]) if files else ""
        raise BadSource(
            f"{path} holds {len(files)} .gguf files{names}; give the path of one .gguf file"
        )
    return files[0]
