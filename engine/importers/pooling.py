"""What sentence-transformers says of an embedding model: its pooling and its longest text.

`modules.json` lists what a text goes through: the transformer, a pooling, a normalization.
Anything else in that list (a dense layer, say) is refused. A folder without it is a plain
encoder: mean pooling, as sentence-transformers itself assumes. Embeddings are always normalized
here, so it makes no difference whether the list says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ImportFailed
from engine.importers.gguf_metadata import Metadata
from engine.importers.json_file import read_json_file, read_optional_settings, read_settings

MODULES_FILE = "modules.json"
SENTENCE_FILE = "sentence_bert_config.json"
MAX_TOKENS = 1 << 24
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_POOLING_KEYS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """`max_tokens` None: as many as the encoder has positions."""

    pooling: str = "mean"
    max_tokens: int | None = None
    lowercases: bool = False


def read_sentence_settings(folder: Path) -> SentenceSettings:
    """Raises ImportFailed for a model that does more than pool and normalize."""
    sentence = read_optional_settings(folder / SENTENCE_FILE)
    max_tokens = sentence.integer("max_seq_length", 0, MAX_TOKENS, default=0)
    return SentenceSettings(
        pooling=_read_pooling(folder),
        max_tokens=max_tokens or None,
        lowercases=sentence.boolean("do_lower_case", False),
    )


def _read_pooling(folder: Path) -> str:
    path = folder / MODULES_FILE
    if not path.exists():
        return "mean"
    pooling = "mean"
    for kind, subfolder in _modules(path):
        if kind == "Pooling":
            pooling = _pooling_mode(read_settings(folder / subfolder / "config.json"))
        elif kind not in ("Transformer", "Normalize"):
            raise ImportFailed(
                f"{path} has a {kind!r} module; supported: Transformer, Pooling and Normalize"
            )
    return pooling


def _modules(path: Path) -> list[tuple[str, str]]:
    """(kind, folder) of each module."""
    items = read_json_file(path)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ImportFailed(f"{path} is not a list of modules; download it again")
    modules = [(str(item.get("type")).rpartition(".")[2], str(item.get("path"))) for item in items]
    for kind, subfolder in modules:
        if kind == "Pooling" and not _FOLDER.fullmatch(subfolder):
            raise ImportFailed(f"{path} names the folder {subfolder[:60]!r}, which cannot be one")
    return modules


def _pooling_mode(settings: Metadata) -> str:
    """The one mode that is switched on. Several at once make longer vectors: refused."""
    modes = [k for k, v in settings.values.items() if k.startswith("pooling_mode_") and v is True]
    if len(modes) != 1 or modes[0] not in _POOLING_KEYS:
        raise ImportFailed(
            f"{settings.path} asks for {' and '.join(modes) or 'no pooling'}; "
            f"supported: one of {', '.join(_POOLING_KEYS)}"
        )
    return _POOLING_KEYS[modes[0]]
