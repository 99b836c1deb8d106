"""The version of the installed program."""

from __future__ import annotations

from importlib import metadata


def own_version() -> str:
    try:
        return metadata.version("hexlm")
    except metadata.PackageNotFoundError:
        return "unknown"  # run from a checkout that is not installed
