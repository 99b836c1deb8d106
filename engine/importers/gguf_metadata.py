"""Typed, checked reading of a GGUF's metadata. Knows types and ranges; not what keys mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.errors import ImportFailed
from engine.importers.gguf_reader import Value


@dataclass(frozen=True, slots=True)
class Metadata:
    """Every getter raises ImportFailed that names the file and the key.

    A getter without a default demands the key.
    """

    path: Path
    values: Mapping[str, Value]

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def wrong(self, key: str, expected: str) -> ImportFailed:
        return ImportFailed(
            f"{self.path}: metadata key {key!r} is {shorten(self.values.get(key))}, "
            f"expected {expected}; use another conversion of the model"
        )

    def required(self, key: str) -> Value:
        if key not in self.values:
            raise ImportFailed(
                f"{self.path}: metadata key {key!r} is missing; use another conversion of the model"
            )
        return self.values[key]

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in low..high. A list of equal ones (one per layer) counts as one."""
        if default is not None and key not in self.values:
            return default
        value = self.required(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        if default is not None and key not in self.values:
            return default
        value = self.required(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        if not math.isfinite(value) or value <= 0:
            raise self.wrong(key, "a finite number above 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def string(self, key: str) -> str:
        value = self.required(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def optional_string(self, key: str) -> str | None:
        return self.string(key) if key in self.values else None

    def strings(self, key: str) -> list[str]:
        value = self.required(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return [str(item) for item in value]

    def integers(self, key: str) -> list[int]:
        value = self.required(key)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            raise self.wrong(key, "a list of integers")
        return [int(item) for item in value.tolist()]


def shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
