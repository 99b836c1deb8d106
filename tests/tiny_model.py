"""A tiny random model, imported from a GGUF as any model is."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from engine.bundle import Bundle
from engine.export.exporter import import_checkpoint
from tests.engine.gguf_files import TinyLlama, write_tiny_llama_gguf


def import_tiny_model(folder: Path, **changes: Unpack[TinyLlama]) -> Bundle:
    """The bundle `folder / "tiny"`; its source is `folder / "tiny.gguf"`."""
    source = write_tiny_llama_gguf(folder / "tiny.gguf", **changes)
    return import_checkpoint(source, folder / "tiny", "tiny", _ignore)


def _ignore(done: int, total: int) -> None:
    pass
