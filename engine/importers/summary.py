"""What a person wants to know of a checkpoint beyond the numbers of its config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """`quantization` is ggml's name of the storage that most bytes of the layers have."""

    title: str
    licence: str
    quantization: str
    pre_tokenizer: str
    num_parameters: int
    file_name: str
    num_file_bytes: int
