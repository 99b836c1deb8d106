"""Texts to windows of token ids of one length, for calibrating and evaluating a model."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.architectures.config import ModelConfig
from server.cli.errors import CliError

MIN_WINDOW = 16
CALIBRATION_FILE = "calibration.txt"


def read_text(path: Path | None) -> str:
    """Of a file, or the text that comes with hexlm: prose, code and numbers in a few languages.

    Raises CliError for what is not UTF-8, OSError for what cannot be read.
    """
    if path is None:
        return resources.files("configs").joinpath(CALIBRATION_FILE).read_text("utf-8")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as exc:
        raise CliError(f"{path} is no UTF-8 text; convert it or give another file") from exc


def token_windows(
    tokenizer_json: str, config: ModelConfig, text: str, length: int, max_windows: int
) -> NDArray[np.int32]:
    """[S, T]: the text from its beginning in windows of `length` tokens, at most `max_windows`.

    A model that wants a BOS token gets one in front of every window. A text that is shorter makes
    one window of its own length. Raises CliError when that is less than `MIN_WINDOW`.
    """
    ids = Tokenizer.from_str(tokenizer_json).encode(text, add_special_tokens=False).ids
    head = [config.bos_token_id] if config.add_bos and config.bos_token_id is not None else []
    length = min(length, config.context_length, len(ids) + len(head))
    if length < MIN_WINDOW:
        raise CliError(f"the text has {len(ids)} tokens; give one of at least {MIN_WINDOW}")
    step = length - len(head)
    starts = range(0, len(ids) - step + 1, step)[:max_windows]
    return np.array([head + ids[start : start + step] for start in starts], np.int32)
