"""The safetensors reader: values of every float storage, and headers that lie."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ImportFailed
from engine.importers.safetensors_reader import looks_like_safetensors, open_safetensors
from tests.bert_folder import safetensors_bytes

VALUES = np.array([[1.0, -2.5, 0.0], [3.0, 0.125, 1e4]], np.float32)


def with_header(header: Any, num_bytes: int = 0) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


def tensor(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ImportFailed) as caught:
        open_safetensors(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_floats_of_every_width_are_read(tmp_path: Path, dtype: Any) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"a": VALUES[:1].astype(dtype), "x": VALUES.astype(dtype)}))
    file = open_safetensors(path)
    assert file.entries["x"].shape == (2, 3)
    np.testing.assert_array_equal(file.read(file.entries["x"]), VALUES)


def test_bf16_is_the_upper_half_of_a_float32(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    upper = (VALUES.view(np.uint32) >> 16).astype(np.uint16)
    path.write_bytes(safetensors_bytes({"x": upper}))
    file = open_safetensors(path)
    np.testing.assert_allclose(file.read(file.entries["x"]), VALUES, rtol=2**-7)


def test_a_storage_without_floats_is_refused_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"x": np.arange(3)}))
    file = open_safetensors(path)
    with pytest.raises(ImportFailed, match=r"tensor 'x' is stored as I64; supported: F64, F32"):
        file.read(file.entries["x"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x01", "its header of 1 bytes does not fit into 1 bytes"),
        (struct.pack("<Q", 2**63), "does not fit into 8 bytes"),
        (struct.pack("<Q", 4) + b"{}", "its header of 4 bytes does not fit into 10 bytes"),
        (struct.pack("<Q", 2) + b"\xff{", "its header is not valid JSON"),
        (struct.pack("<Q", 50_000) + b"[" * 50_000, "its header is not valid JSON"),
        (with_header([]), "its header is not a JSON object"),
        (with_header({"x": 5}), "describes the tensor 'x' wrongly"),
        (with_header(tensor(dtype="F99")), "has the unknown storage 'F99'"),
        (with_header(tensor(dtype=[])), "has the unknown storage"),
        (with_header(tensor(shape="2"), 8), "describes the tensor 'x' wrongly"),
        (with_header(tensor(shape=[-2]), 8), "describes the tensor 'x' wrongly"),
        (with_header(tensor(shape=[True, 2]), 8), "describes the tensor 'x' wrongly"),
        (with_header(tensor(shape=[1] * 9), 8), "describes the tensor 'x' wrongly"),
        (with_header(tensor(offsets=[0]), 8), "describes the tensor 'x' wrongly"),
        (with_header(tensor(offsets=[8, 0]), 8), "has the wrong number of bytes"),
        (with_header(tensor(shape=[2**40, 2**40]), 8), "has the wrong number of bytes"),
        (with_header(tensor(offsets=[4, 12]), 12), "does not follow the one before it"),
        (with_header(tensor(), 7), "it has 7 bytes of tensors instead of 8"),
        (with_header(tensor(), 9), "it has 9 bytes of tensors instead of 8"),
        (with_header(tensor() | {"y": tensor()["x"]}, 8), "does not follow the one before it"),
    ],
)
def test_a_header_that_lies_is_refused_in_one_line(
    tmp_path: Path, content: bytes, said: str
) -> None:
    assert said in refusal(tmp_path / "x.safetensors", content)


def test_an_empty_and_a_missing_file_are_named(tmp_path: Path) -> None:
    assert "is an empty file" in refusal(tmp_path / "x", b"")
    with pytest.raises(ImportFailed, match="does not exist"):
        open_safetensors(tmp_path / "nowhere")


def test_the_content_tells_what_a_file_is(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    assert not looks_like_safetensors(path)
    path.write_bytes(safetensors_bytes({"x": VALUES}))
    assert looks_like_safetensors(path)
    path.write_bytes(b"GGUF\x03\x00\x00\x00{")
    assert not looks_like_safetensors(path)


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 200), value=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_read_and_never_crashes(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    content = bytearray(safetensors_bytes({"x": VALUES, "y": VALUES[0]}))
    content[position % len(content)] = value
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    path.write_bytes(content)
    try:
        file = open_safetensors(path)
    except ImportFailed:
        return
    for entry in file.entries.values():
        if entry.dtype in ("F32", "F16", "BF16", "F64"):
            assert file.read(entry).shape == entry.shape
