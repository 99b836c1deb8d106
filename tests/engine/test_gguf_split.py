"""A split GGUF is one model: the parts together, whichever of them is given."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from engine.errors import ImportFailed
from engine.export.exporter import open_checkpoint
from engine.importers.gguf import GgufCheckpoint, read_gguf
from engine.importers.source_files import split_parts
from tests.engine.gguf_files import GgufParts, Metadata, tiny_llama_parts, write_gguf


def write_split(folder: Path, count: int = 3) -> list[Path]:
    """The tiny model in parts: all metadata in the first, the tensors dealt out in turn."""
    whole = tiny_llama_parts()
    names = list(whole.tensors)
    paths = []
    for number in range(count):
        metadata: Metadata = dict(whole.metadata) if number == 0 else {}
        metadata |= {
            "split.no": number,
            "split.count": count,
            "split.tensors.count": len(names),
        }
        tensors = {name: whole.tensors[name] for name in names[number::count]}
        path = folder / f"tiny-{number + 1:05}-of-{count:05}.gguf"
        paths.append(write_gguf(path, GgufParts(metadata, tensors)))
    return paths


def test_the_parts_are_the_model(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    whole = read_gguf(write_gguf(tmp_path / "whole.gguf", tiny_llama_parts()))
    for path in paths:
        split = open_checkpoint(path)
        assert isinstance(split, GgufCheckpoint)
        assert split.config == whole.config
        assert split.summary.num_file_bytes == sum(path.stat().st_size for path in paths)
        assert split.summary.file_name == paths[0].name
    for name in ("embed", "layers.0.q", "layers.1.down", "final_norm"):
        expected = whole.tensor(name).dequantize()
        assert np.array_equal(read_gguf(paths[1]).tensor(name).dequantize(), expected)
    assert split.digest != whole.digest


def test_names_tell_the_parts() -> None:
    parts = split_parts(Path("x/m-Q4-00002-of-00003.gguf"))
    assert parts == tuple(Path(f"x/m-Q4-0000{n}-of-00003.gguf") for n in (1, 2, 3))
    assert split_parts(Path("x/m.gguf")) == (Path("x/m.gguf"),)


def refusal(path: Path) -> str:
    with pytest.raises(ImportFailed) as caught:
        read_gguf(path)
    return str(caught.value)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[1].unlink()
    assert f"{paths[1]} is missing, one of 3 parts; download it" in refusal(paths[0])


def test_a_part_of_another_model_is_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    shutil.copy(paths[0], paths[2])
    assert "says that it is part 1 of 3, its name says 3 of 3" in refusal(paths[0])
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(write_split(other, count=2)[1], paths[1])
    assert "part 2 of 2, its name says 2 of 3" in refusal(paths[0])


def test_a_file_that_is_no_part_in_the_place_of_one_is_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    write_gguf(paths[1], tiny_llama_parts())
    assert "'split.no' is missing" in refusal(paths[0])


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path, count=2)
    whole = tiny_llama_parts()
    metadata: Metadata = {"split.no": 1, "split.count": 2}
    write_gguf(paths[1], GgufParts(metadata, whole.tensors))
    assert "is in two parts" in refusal(paths[0])


def test_too_few_tensors_are_told(tmp_path: Path) -> None:
    paths = write_split(tmp_path, count=2)
    metadata: Metadata = {"split.no": 1, "split.count": 2}
    write_gguf(paths[1], GgufParts(metadata, {}))
    assert "its 2 parts hold" in refusal(paths[0])


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    path = write_split(tmp_path)[0].rename(tmp_path / "renamed.gguf")
    assert "is one of 3 parts of a split GGUF, but not named like one" in refusal(path)


def test_a_count_that_nobody_could_have_costs_nothing(tmp_path: Path) -> None:
    path = write_split(tmp_path)[0].rename(tmp_path / "m-00001-of-99999.gguf")
    assert "m-00002-of-99999.gguf is missing" in refusal(path)
