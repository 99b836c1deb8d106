"""What peers are installed into: an environment of its own for each, in the user's cache folder,
made once. Knows no peers."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import platformdirs

from server.bench.errors import BenchError

NUM_THREADS = 2
ROOT = Path(__file__).parents[3]
MAX_SHOWN = 400


def cached_folder(name: str) -> Path:
    return Path(platformdirs.user_cache_dir("hexlm", appauthor=False)) / "bench" / name


def python_with(name: str, packages: Sequence[str]) -> Path:
    """The interpreter of an environment that has these packages.

    Raises BenchError if they cannot be installed.
    """
    folder = cached_folder(name)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    marker, wanted = folder / "packages.txt", "\n".join(packages)
    if not marker.is_file() or marker.read_text(encoding="utf-8") != wanted:
        venv.create(folder, with_pip=True, clear=True)
        run(f"the packages of {name}", [str(python), "-m", "pip", "install", "-q", *packages])
        marker.write_text(wanted, encoding="utf-8")
    return python


def module_command(python: Path, module: str, *arguments: str) -> list[str]:
    """Runs a module of this repository in an environment that does not have it installed."""
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [str(python), "-c", code, *arguments]


def run(what: str, command: Sequence[str]) -> None:
    """Raises BenchError with the last words of a command that fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise BenchError(f"{what} cannot be made: {error}") from error
    if done.returncode:
        words = " ".join((done.stderr or done.stdout)[-MAX_SHOWN:].split())
        raise BenchError(f"{what} cannot be made: {words}")


def tool(name: str, what_for: str) -> str:
    """The path of a program. Raises BenchError where it is not installed."""
    found = shutil.which(name)
    if found is None:
        raise BenchError(f"{what_for} needs {name}; install it and try again")
    return found
