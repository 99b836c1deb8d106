"""Compiled kernels on disk: compiled at a machine's first start, loaded at every later one.

numba keys its cache by the file of the function alone, so the folder's name holds what else the
code depends on: our kernels' sources and the versions of numba and llvmlite.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import llvmlite
import numba
import platformdirs

from engine import attention_kernel, rows_kernel, sampling_kernel, simd

_DISPATCHERS = (
    attention_kernel.run_part,
    rows_kernel.copy_rows,
    rows_kernel.unpack_rows,
    sampling_kernel.penalize,
    sampling_kernel.sample_row,
    sampling_kernel.log_sum_exp,
)


def default_folder() -> Path:
    return Path(platformdirs.user_cache_dir("hexlm", appauthor=False)) / "kernels"


def use_kernel_cache(root: Path) -> bool:
    """Loads from and stores to a folder below `root`; True if there are kernels in it already."""
    folder = root / _fingerprint()
    compiled = folder.is_dir()
    vars(numba.config)["CACHE_DIR"] = str(folder)
    for dispatcher in _DISPATCHERS:
        dispatcher.enable_caching()
    return compiled


def _fingerprint() -> str:
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for module in (simd, attention_kernel, rows_kernel, sampling_kernel):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()[:16]
