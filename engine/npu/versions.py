"""Which provider and which QAIRT are installed, found without loading either.

The build of QAIRT stands in its HTP library as text. What a compiled context says of itself is
compared with it later (`context_store.check_model`).
"""

from __future__ import annotations

import mmap
import re
from importlib import metadata
from pathlib import Path

from engine.errors import DeviceUnavailable

PROVIDER_PACKAGE = "onnxruntime-qnn"
_BUILD = re.compile(rb"v2\.\d{1,3}\.\d{1,3}\.\d{6,}")


def provider_version() -> str:
    """Raises DeviceUnavailable when the provider is not installed."""
    try:
        return metadata.version(PROVIDER_PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise DeviceUnavailable(
            f"the package {PROVIDER_PACKAGE} is not installed; run: pip install 'hexlm[npu]'"
        ) from error


def qairt_build(library: Path) -> str:
    """For example `v2.51.0.260929181845`. Raises DeviceUnavailable if the library has none."""
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as m:
            found = _BUILD.search(m)
            build = found.group().decode() if found else None
    except (OSError, ValueError) as error:
        raise DeviceUnavailable(f"the HTP library {library} cannot be read: {error}") from error
    if build is None:
        raise DeviceUnavailable(f"{library} does not say which version of QAIRT it is")
    return build


def qairt_version(build: str) -> str:
    """`2.51.0` of a build: what decides about compatibility, the same on all platforms."""
    return ".".join(build.removeprefix("v").split(".")[:3])
