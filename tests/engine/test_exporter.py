"""The import is all or nothing, whoever interrupts it, and happens once at a time."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from engine.bundle import Bundle
from engine.errors import ImportFailed
from engine.export.exporter import OnProgress, import_checkpoint
from engine.export.import_lock import import_lock, own_identity, try_lock
from engine.importers.checkpoint import Checkpoint
from tests.engine.gguf_files import write_tiny_llama_gguf


@dataclass(frozen=True)
class FakeWritten:
    files: tuple[str, ...] = ("weights.bin",)
    weight_format: str = "fake"


def write_fake(checkpoint: Checkpoint, folder: Path, on_progress: OnProgress) -> FakeWritten:
    (folder / "weights.bin").write_bytes(checkpoint.tensor("layers.0.q").raw().tobytes())
    on_progress(1, 1)
    return FakeWritten()


def write_and_raise(error: BaseException) -> Callable[[Checkpoint, Path, OnProgress], FakeWritten]:
    def write(checkpoint: Checkpoint, folder: Path, on_progress: OnProgress) -> FakeWritten:
        (folder / "weights.bin").write_bytes(b"half")
        raise error

    return write


def ignore(done: int, total: int) -> None:
    pass


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_llama_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "models" / "tiny"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_import_leaves_a_bundle_and_nothing_else(source: Path, target: Path) -> None:
    steps: list[tuple[int, int]] = []
    bundle = import_checkpoint(source, target, "tiny", lambda *step: steps.append(step), write_fake)
    assert names(target.parent) == ["tiny"]
    assert bundle.weight_format == "fake"
    assert bundle.source.path == str(source)
    assert names(target) == ["chat_template.jinja", "model.json", "tokenizer.json", "weights.bin"]
    assert steps == [(1, 1)]


def test_the_real_writer_is_the_default(source: Path, target: Path) -> None:
    bundle = import_checkpoint(source, target, "tiny", ignore)
    assert bundle.weights_path.stat().st_size > 0
    bundle.verify()


@pytest.mark.parametrize("error", [ImportFailed("bad tensor"), KeyboardInterrupt()])
def test_an_interrupted_import_leaves_nothing(
    source: Path, target: Path, error: BaseException
) -> None:
    with pytest.raises(type(error)):
        import_checkpoint(source, target, "tiny", ignore, write_and_raise(error))
    assert names(target.parent) == []


def test_an_interrupted_replacement_leaves_the_old_bundle(source: Path, target: Path) -> None:
    old = import_checkpoint(source, target, "tiny", ignore, write_fake)
    with pytest.raises(KeyboardInterrupt):
        import_checkpoint(source, target, "tiny", ignore, write_and_raise(KeyboardInterrupt()))
    assert Bundle.open(target) == old


def test_a_replacement_takes_the_place_of_the_old_bundle(source: Path, target: Path) -> None:
    import_checkpoint(source, target, "tiny", ignore, write_fake)
    other = write_tiny_llama_gguf(source.with_name("other.gguf"), seed=1)
    bundle = import_checkpoint(other, target, "tiny", ignore, write_fake)
    assert bundle.source.path == str(other)
    assert names(target.parent) == ["tiny"]


def test_what_a_killed_import_left_is_removed_by_the_next(source: Path, target: Path) -> None:
    stale = target.parent / ".importing-tiny"
    stale.mkdir(parents=True)
    (stale / "weights.bin").write_bytes(b"half")
    (target.parent / ".lock-tiny").write_text("999999999 1.00", "ascii")
    import_checkpoint(source, target, "tiny", ignore, write_fake)
    assert names(target.parent) == ["tiny"]


def test_a_full_disk_is_explained(source: Path, target: Path) -> None:
    full = write_and_raise(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(ImportFailed, match="the disk became full while importing"):
        import_checkpoint(source, target, "tiny", ignore, full)
    assert names(target.parent) == []


def test_too_little_space_is_said_beforehand_with_the_numbers(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr("engine.export.exporter.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(ImportFailed, match=r"needs about 0 MB in .*, 0 MB are free; make room"):
        import_checkpoint(source, target, "tiny", ignore, write_fake)


def test_a_file_that_is_no_model_creates_nothing(tmp_path: Path, target: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"<html>")
    with pytest.raises(ImportFailed, match="is an HTML page"):
        import_checkpoint(bad, target, "bad", ignore, write_fake)
    assert not target.parent.exists()


def test_two_imports_of_one_file_write_once(source: Path, target: Path) -> None:
    entered, proceed = threading.Event(), threading.Event()
    writers: list[str] = []

    def write_slowly(checkpoint: Checkpoint, folder: Path, progress: OnProgress) -> FakeWritten:
        writers.append("first")
        entered.set()
        proceed.wait(10)
        return write_fake(checkpoint, folder, progress)

    def write_again(checkpoint: Checkpoint, folder: Path, progress: OnProgress) -> FakeWritten:
        writers.append("second")
        return write_fake(checkpoint, folder, progress)

    first = threading.Thread(
        target=import_checkpoint, args=(source, target, "tiny", ignore, write_slowly)
    )
    first.start()
    assert entered.wait(10)
    threading.Timer(0.3, proceed.set).start()
    bundle = import_checkpoint(source, target, "tiny", ignore, write_again)
    first.join(10)
    assert writers == ["first"]
    assert bundle == Bundle.open(target)


def test_the_lock_is_held_by_one_and_free_afterwards(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with import_lock(lock) as waited:
        assert not waited
        assert lock.read_text("ascii") == own_identity()
        assert not try_lock(lock)
    assert not lock.exists()


def test_a_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lock.write_text(f"{child.pid} {psutil.Process(child.pid).create_time():.2f}", "ascii")
    assert not try_lock(lock)
    child.communicate(b"\n")
    assert try_lock(lock)


def test_a_lock_whose_process_id_was_given_to_another_is_taken_over(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(f"{os.getpid()} 1.00", "ascii")
    assert try_lock(lock)


def test_a_lock_that_is_being_written_is_respected_for_a_moment(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    assert not try_lock(lock)
    long_ago = time.time() - 60
    os.utime(lock, (long_ago, long_ago))
    assert try_lock(lock)


def test_the_source_is_recorded_so_that_a_change_is_noticed(source: Path, target: Path) -> None:
    recorded = import_checkpoint(source, target, "tiny", ignore, write_fake).source
    assert recorded.num_bytes == source.stat().st_size
    assert recorded.modified_ns == source.stat().st_mtime_ns
    assert len(recorded.sha256) == 64
