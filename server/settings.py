"""The kinds of values a configuration key can have: how each is read, checked and refused.

A kind is a function from the TOML (or flag) value to the value kept; it raises `ValueError` with
the half sentence that follows "must be". Knows no key and no file; `config.py` has those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

Kind = Callable[[Any], Any]

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}iB": 1024 ** (i + 1) for i, prefix in enumerate("KMGT")}
_UNITS |= {f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("KMGT")}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def setting(default: Any, kind: Kind) -> Any:
    """A dataclass field that carries its kind; a mapping as default is copied per instance."""
    metadata = {"kind": kind}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def integer(minimum: int, maximum: int | None = None) -> Kind:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(expected)
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(expected)
        return value

    expected = (
        f"an integer of at least {minimum}"
        if maximum is None
        else f"an integer from {minimum} to {maximum}"
    )
    return read


def seconds(minimum: float = 0.0) -> Kind:
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(expected)
        if not minimum <= value < float("inf"):
            raise ValueError(expected)
        return float(value)

    expected = f"a number of seconds, at least {minimum:g}"
    return read


def one_of(*choices: str) -> Kind:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError("one of " + ", ".join(choices))
        return str(value)

    return read


def texts(value: Any) -> tuple[str, ...]:
    """A string or a list of strings; the string is a list of one."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(v, str) for v in values):
        raise ValueError("a string or a list of strings")
    return tuple(values)


def text_table(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
        raise ValueError("a table of strings")
    return dict(value)


def choice_table(*choices: str) -> Kind:
    """A table from any name to one of `choices`."""

    def read(value: Any) -> dict[str, str]:
        table = text_table(value)
        if not set(table.values()) <= set(choices):
            raise ValueError("a table with values of " + ", ".join(choices))
        return table

    return read


def size_bytes(value: Any) -> int:
    """Bytes from an integer or from text such as "2GiB", "1.5 GB" or "800MiB"."""
    expected = 'a size such as "2GiB", "800MiB" or a number of bytes'
    if isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[2] not in _UNITS:
            raise ValueError(expected)
        num_bytes = int(float(match[1]) * _UNITS[match[2]])
    if num_bytes <= 0:
        raise ValueError(expected)
    return num_bytes


def auto_or(kind: Kind) -> Kind:
    """`"auto"` is kept as None: whoever uses the value detects it, and says why."""

    def read(value: Any) -> Any:
        if value == "auto":
            return None
        try:
            return kind(_number_from_flag(value))
        except ValueError as error:
            raise ValueError(f'"auto" or {error}') from None

    return read


def _number_from_flag(value: Any) -> Any:
    """Flags that accept "auto" arrive as text, also when they hold a number."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value
