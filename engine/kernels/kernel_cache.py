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

from engine.kernels import (
    attention_items,
    attention_kernel,
    attention_products,
    attention_simd,
    attention_tiles,
    compiled,
    dot_product,
    gather_kernel,
    page_write_kernel,
    panel_amx,
    panel_matrix,
    panel_product,
    panel_simd,
    panel_tiles,
    rounding_simd,
    rows_kernel,
    sampling_kernel,
    simd,
    step_kernel,
    thread_team,
)
from engine.speculation import match_model

_MODULES = (
    attention_items,
    attention_kernel,
    attention_products,
    attention_simd,
    attention_tiles,
    compiled,
    dot_product,
    gather_kernel,
    match_model,
    page_write_kernel,
    panel_amx,
    panel_matrix,
    panel_product,
    panel_simd,
    panel_tiles,
    rounding_simd,
    rows_kernel,
    sampling_kernel,
    simd,
    step_kernel,
    thread_team,
)

_DISPATCHERS = (
    attention_kernel.run_part,
    gather_kernel.gather_window,
    rows_kernel.copy_rows,
    rows_kernel.first_row_beyond,
    rows_kernel.unpack_rows,
    *sampling_kernel.DISPATCHERS,
    *match_model.DISPATCHERS,
    step_kernel.run_step,
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
    known = (numba.__version__, llvmlite.__version__, panel_tiles.HAS_MATRIX_UNIT)
    digest = hashlib.sha256(repr(known).encode())
    for module in _MODULES:
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()[:16]
