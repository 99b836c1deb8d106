"""Kernels are compiled once per version of their sources, and loaded from disk afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels import kernel_cache

ROOT = Path(__file__).parent.parent.parent

# In a process of its own: what numba has compiled or configured cannot be taken back.
PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from engine.kernels import kernel_cache
from engine.kernels.sampling_kernel import penalize

was_there = kernel_cache.use_kernel_cache(Path(sys.argv[1]))
counts, tokens = np.zeros(4, np.int32), np.zeros(1, np.int32)
penalize(np.zeros(4, np.float32), counts, tokens, 0, *np.ones(3, np.float32))
print(was_there, len(penalize.stats.cache_hits), len(penalize.stats.cache_misses))
"""


def run(folder: Path) -> str:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(folder)]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_the_second_process_loads_what_the_first_compiled(tmp_path: Path) -> None:
    assert run(tmp_path / "kernels").split() == ["False", "0", "1"]
    assert list((tmp_path / "kernels").rglob("*.nbc"))
    assert run(tmp_path / "kernels").split() == ["True", "1", "0"]


def test_the_folder_is_named_after_sources_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    name = kernel_cache._fingerprint()
    assert len(name) == 16 and name == kernel_cache._fingerprint()
    monkeypatch.setattr("engine.kernels.kernel_cache.numba.__version__", "0.0")
    assert kernel_cache._fingerprint() != name


def test_the_default_folder_is_in_the_users_cache() -> None:
    folder = kernel_cache.default_folder()
    assert folder.is_absolute() and folder.name == "kernels" and "hexlm" in folder.parts
