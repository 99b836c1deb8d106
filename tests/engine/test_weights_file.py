"""The weights file: what is appended can be mapped, described to ONNX, and found again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx.external_data_helper import load_external_data_for_tensor

from engine.export.weights_file import (
    ALIGNMENT_BYTES,
    StoredArray,
    StoredMatrix,
    WeightsFile,
    map_array,
    read_matrix,
)

ARRAYS: dict[str, NDArray[np.generic]] = {
    "a": np.arange(7, dtype=np.float32),
    "b": np.arange(5000, dtype=np.uint8).reshape(2, 50, 50),
    "c": np.array([[0.5, -2.0]], np.float32),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights.bin"


@pytest.fixture
def stored(path: Path) -> dict[str, StoredArray]:
    with WeightsFile(path) as file:
        return {name: file.append(name, array) for name, array in ARRAYS.items()}


def test_arrays_are_mapped_as_they_were_appended(
    path: Path, stored: dict[str, StoredArray]
) -> None:
    for name, array in ARRAYS.items():
        found = map_array(path, stored[name])
        assert found.dtype == array.dtype and np.array_equal(found, array)


def test_arrays_begin_at_pages(stored: dict[str, StoredArray]) -> None:
    assert [array.offset for array in stored.values()] == [0, ALIGNMENT_BYTES, 3 * ALIGNMENT_BYTES]
    assert [array.num_bytes for array in stored.values()] == [28, 5000, 8]


def test_the_initializer_is_what_onnx_reads(path: Path, stored: dict[str, StoredArray]) -> None:
    for name, array in ARRAYS.items():
        tensor = stored[name].initializer(path.name)
        assert tensor.data_location == onnx.TensorProto.EXTERNAL
        load_external_data_for_tensor(tensor, str(path.parent))
        assert np.array_equal(onnx.numpy_helper.to_array(tensor), array)


def test_an_array_that_is_not_contiguous_is_stored_in_its_own_order(path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    with WeightsFile(path) as file:
        stored = file.append("t", array)
    assert np.array_equal(map_array(path, stored), array)


def test_the_mapping_cannot_be_written(path: Path, stored: dict[str, StoredArray]) -> None:
    with pytest.raises(ValueError, match="read-only"):
        map_array(path, stored["a"])[0] = 1


def test_a_file_that_is_too_short_is_refused(path: Path, stored: dict[str, StoredArray]) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises((ValueError, OSError)):  # which one depends on the operating system
        map_array(path, stored["c"])


def test_the_index_gives_back_its_matrices(tmp_path: Path, stored: dict[str, StoredArray]) -> None:
    index = tmp_path / "weights.json"
    matrix = StoredMatrix(4, 2, 100, stored["b"], stored["c"])
    whole = StoredMatrix(
        8, 1, 2, stored["a"], stored["c"], block_size=64, zero_points=stored["b"], bias=stored["c"]
    )
    dense = StoredMatrix(32, 1, 2, stored["c"], scales=None)
    matrices = {"embed": matrix, "whole": whole, "dense": dense}
    index.write_text(json.dumps({name: asdict(matrix) for name, matrix in matrices.items()}))
    for name, expected in matrices.items():
        assert read_matrix(index, name) == expected
    with pytest.raises(KeyError, match="missing"):
        read_matrix(index, "missing")


@pytest.mark.parametrize("text", ["{}", "[]", '{"embed": {}}', '{"embed": {"data": 1}}', "{"])
def test_an_index_that_is_not_ours_is_refused(tmp_path: Path, text: str) -> None:
    index = tmp_path / "weights.json"
    index.write_text(text, "utf-8")
    with pytest.raises((KeyError, TypeError, ValueError)):
        read_matrix(index, "embed")
