"""llama.cpp's own server, compiled for the machine that it runs on.

Its source is the one that the package `llama-cpp-python` carries; cmake, ninja and a compiler of
C++ must be installed.
"""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

from server.bench.errors import BenchError
from server.bench.server_process import RunningServer, free_port
from tests.bench.peers.environment import NUM_THREADS, cached_folder, python_with, run, tool

NAME = "llama-server"
VERSION = "0.3.36"
"""Of llama-cpp-python."""

_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
)
_LOAD_TILES = "    _tile_loadconfig(&tc);"
_BUILD_PACKAGES = ("scikit-build-core[pyproject]>=0.9.2",)
"""What pip asks of a source package before it hands it out."""


def start(folder: Path, gguf: Path, num_slots: int, context: int) -> RunningServer:
    """`context`: tokens of each slot."""
    port = free_port()
    command = [
        str(binary()),
        *("--model", str(gguf), "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", str(NUM_THREADS), "--threads-batch", str(NUM_THREADS)),
        *("--parallel", str(num_slots), "--ctx-size", str(num_slots * context)),
    ]
    return RunningServer(NAME, command, port, folder / f"{NAME}-{port}.log")


def binary() -> Path:
    """Built if it is not there yet, which takes minutes. Raises BenchError."""
    build = cached_folder(f"{NAME}-{VERSION}") / "build"
    name = "llama-server.exe" if os.name == "nt" else "llama-server"
    if not (build / "bin" / name).is_file():
        _compile(_source(build.parent), build)
    return build / "bin" / name


def _source(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    python = python_with("source-packages", _BUILD_PACKAGES)
    command = [str(python), "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
    package = f"llama-cpp-python=={VERSION}"
    command += ["--no-binary", "llama-cpp-python", "--dest", str(folder), package]
    run("the source of llama.cpp", command)
    for archive in folder.glob("llama_cpp_python-*.tar.gz"):
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        archive.unlink()
    for found in folder.glob("llama_cpp_python-*/vendor/llama.cpp"):
        _mend(found / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
        return found
    raise BenchError(f"the source of {package} has no llama.cpp in it")


def _mend(file: Path) -> None:
    """GCC 12 takes the configuration of the matrix tiles for unread, since its intrinsic names
    only the first 8 bytes, and leaves the rest out: the server then dies of its first prompt."""
    text = file.read_text(encoding="utf-8")
    is_read = '    __asm__ volatile("" : : "r"(&tc) : "memory");\n'
    if _LOAD_TILES not in text:
        raise BenchError(f"{file.name} of llama.cpp is not the one that is known here")
    if is_read not in text:
        file.write_text(text.replace(_LOAD_TILES, is_read + _LOAD_TILES), encoding="utf-8")


def _compile(source: Path, build: Path) -> None:
    cmake = tool("cmake", "a llama.cpp of one's own")
    tool("ninja", "a llama.cpp of one's own")
    configure = [cmake, "-G", "Ninja", "-S", str(source), "-B", str(build), *_OPTIONS]
    run("the build of llama.cpp", configure)
    compile_it = [cmake, "--build", str(build), "--target", "llama-server"]
    run("llama.cpp", [*compile_it, "--parallel", str(os.cpu_count() or 1)])
