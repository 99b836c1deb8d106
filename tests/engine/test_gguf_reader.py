"""The container reader: valid files, odd files, and every kind of damage."""

from __future__ import annotations

import os
import re
import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ImportFailed
from engine.importers.gguf import read_gguf
from engine.importers.gguf_reader import open_gguf
from tests.engine.gguf_files import (
    GgufParts,
    encode_gguf,
    encode_header,
    encode_string,
    encode_tensor,
    tiny_llama_parts,
    write_gguf,
)

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX files")
reuse_tmp_path = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TINY = tiny_llama_parts(num_layers=1)
TINY_BYTES = encode_gguf(TINY)


def small_parts() -> GgufParts:
    rows = np.arange(64, dtype=np.float32).reshape(2, 32)
    tensors = {"first": encode_tensor(rows, "F32"), "second": encode_tensor(rows + 1, "Q8_0")}
    return GgufParts({"general.architecture": "llama", "number": 7}, tensors)


def failure(path: Path) -> str:
    with pytest.raises(ImportFailed) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def failure_of(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return failure(path)


def with_offset(data: bytes, name: str, offset: int) -> bytes:
    """The file with another offset in the table entry of a tensor with two dimensions."""
    at = data.index(encode_string(name)) + 8 + len(name) + 4 + 2 * 8 + 4
    return data[:at] + struct.pack("<Q", offset) + data[at + 8 :]


def test_tensors_and_metadata_equal_the_reference_reader(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", TINY)
    ours, reference = open_gguf(path), GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert ours.tensor_bytes(info).tobytes() == tensor.data.tobytes()
    for key, value in TINY.metadata.items():
        read = ours.metadata[key]
        expected = pytest.approx(value) if isinstance(value, float) else value
        assert (read.tolist() if isinstance(read, np.ndarray) else read) == expected


def test_version_2_is_read(tmp_path: Path) -> None:
    parts = small_parts()
    parts.version = 2
    assert open_gguf(write_gguf(tmp_path / "a.gguf", parts)).version == 2


@pytest.mark.parametrize("alignment", [1, 64, 1024])
def test_any_power_of_two_is_an_alignment(tmp_path: Path, alignment: int) -> None:
    parts = small_parts()
    parts.alignment = alignment
    parts.metadata["general.alignment"] = alignment
    file = open_gguf(write_gguf(tmp_path / "a.gguf", parts))
    assert file.tensor_bytes(file.tensors["second"]).tobytes() == parts.tensors["second"].data


@pytest.mark.parametrize("alignment", [0, 48])
def test_other_alignments_are_refused(tmp_path: Path, alignment: int) -> None:
    parts = small_parts()
    parts.metadata["general.alignment"] = alignment
    message = failure_of(tmp_path, encode_gguf(parts))
    assert f"general.alignment is {alignment}, not a power of two" in message


def test_trailing_bytes_unknown_keys_and_another_order_change_nothing(tmp_path: Path) -> None:
    parts = small_parts()
    parts.metadata = {"unknown.key": ["x", "y"], **dict(reversed(parts.metadata.items()))}
    parts.trailing = b"GGUF" + bytes(33)
    file = open_gguf(write_gguf(tmp_path / "with space ñ.gguf", parts))
    assert file.tensor_bytes(file.tensors["first"]).tobytes() == parts.tensors["first"].data


def test_arrays_of_arrays_are_read(tmp_path: Path) -> None:
    inner = struct.pack("<IQ2i", 5, 2, 1, 2)
    value = struct.pack("<IIQ", 9, 9, 2) + inner + inner
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + encode_string("nested") + value
    (tmp_path / "a.gguf").write_bytes(head)
    nested = open_gguf(tmp_path / "a.gguf").metadata["nested"]
    assert isinstance(nested, list)
    assert [np.asarray(item).tolist() for item in nested] == [[1, 2], [1, 2]]


def test_arrays_nested_without_end_are_refused(tmp_path: Path) -> None:
    value = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 2000
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + encode_string("deep") + value
    assert "nests arrays deeper than 4" in failure_of(tmp_path, head)


def test_a_large_vocabulary_is_read_in_less_than_a_second(tmp_path: Path) -> None:
    parts = small_parts()
    parts.metadata["tokens"] = [f"token {index}" for index in range(150_000)]
    path = write_gguf(tmp_path / "a.gguf", parts)
    began = time.process_time()
    assert open_gguf(path).metadata["tokens"] == parts.metadata["tokens"]
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("cut", range(1, len(encode_header(small_parts()))))
def test_a_header_cut_at_any_byte_says_download_again(tmp_path: Path, cut: int) -> None:
    assert "download it again" in failure_of(tmp_path, encode_gguf(small_parts())[:cut])


@reuse_tmp_path
@given(cut=st.integers(1, len(TINY_BYTES) - 1))
def test_a_model_cut_anywhere_is_refused(tmp_path: Path, cut: int) -> None:
    (tmp_path / "a.gguf").write_bytes(TINY_BYTES[:cut])
    with pytest.raises(ImportFailed, match="download it again"):
        read_gguf(tmp_path / "a.gguf")


def test_one_missing_byte_names_the_tensor_and_both_sizes(tmp_path: Path) -> None:
    parts = small_parts()
    parts.tensors = dict(list(parts.tensors.items())[:1])
    data = encode_gguf(parts)
    message = failure_of(tmp_path, data[:-1])
    assert f"tensor 'first' needs {len(data)} bytes of file, it has {len(data) - 1}" in message


@reuse_tmp_path
@given(
    at=st.integers(4, len(encode_header(TINY)) - 1),
    junk=st.binary(min_size=1, max_size=9),
)
def test_a_damaged_header_fails_cleanly_or_still_fits_the_file(
    tmp_path: Path, at: int, junk: bytes
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(TINY_BYTES[:at] + junk + TINY_BYTES[at + len(junk) :])
    try:
        file = open_gguf(path)
        read_gguf(path)
    except ImportFailed as exc:
        assert "\n" not in str(exc)
    else:
        ends = [info.start + info.num_bytes for info in file.tensors.values()]
        assert max(ends) <= path.stat().st_size


@pytest.mark.parametrize(
    ("at", "what"), [(8, "tensors"), (16, "metadata entries")], ids=["tensors", "metadata"]
)
def test_counts_beyond_the_file_are_refused_at_once(tmp_path: Path, at: int, what: str) -> None:
    data = bytearray(encode_gguf(small_parts()))
    data[at : at + 8] = struct.pack("<Q", 2**63)
    assert f"claims {2**63} {what}" in failure_of(tmp_path, bytes(data))


@pytest.mark.parametrize("length", [2**64 - 1, 2**40, 5000])
def test_string_lengths_beyond_the_file_are_refused(tmp_path: Path, length: int) -> None:
    data = encode_gguf(small_parts())
    at = data.index(encode_string("llama"))
    message = failure_of(tmp_path, data[:at] + struct.pack("<Q", length) + data[at + 8 :])
    assert "metadata key 'general.architecture' needs" in message


def test_dimensions_whose_product_overflows_are_refused(tmp_path: Path) -> None:
    data = encode_gguf(small_parts())
    at = data.index(encode_string("first")) + 8 + 5 + 4
    huge = data[:at] + struct.pack("<QQ", 2**62, 2**62) + data[at + 16 :]
    needed = re.search(r"tensor 'first' needs (\d+) bytes", failure_of(tmp_path, huge))
    assert needed is not None
    assert 2**126 <= int(needed[1]) < 2**126 + len(data)


def test_tensors_beyond_the_file_are_named_with_both_sizes(tmp_path: Path) -> None:
    data = encode_gguf(small_parts())
    message = failure_of(tmp_path, with_offset(data, "second", 2**40))
    assert "tensor 'second' needs 1099511" in message
    assert f"it has {len(data)}" in message


def test_tensors_off_the_alignment_are_refused(tmp_path: Path) -> None:
    data = with_offset(encode_gguf(small_parts()), "second", 33)
    assert "lies at 33, not a multiple of the alignment 32" in failure_of(tmp_path, data)


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    data = with_offset(encode_gguf(small_parts()), "second", 0)
    assert "overlaps tensor" in failure_of(tmp_path, data)


def test_a_tensor_that_appears_twice_is_refused(tmp_path: Path) -> None:
    parts = small_parts()
    parts.tensors = {"aaaa": parts.tensors["first"], "aaab": parts.tensors["second"]}
    twice = encode_gguf(parts).replace(encode_string("aaab"), encode_string("aaaa"))
    assert "tensor 'aaaa' appears twice" in failure_of(tmp_path, twice)


def test_a_key_that_appears_twice_is_refused(tmp_path: Path) -> None:
    parts = small_parts()
    parts.metadata |= {"aaaa": 1, "aaab": 2}
    data = encode_gguf(parts).replace(encode_string("aaab"), encode_string("aaaa"))
    assert "repeats the key 'aaaa'" in failure_of(tmp_path, data)


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    data = encode_gguf(small_parts())
    at = data.index(encode_string("second")) + 8 + 6 + 4
    odd = data[:at] + struct.pack("<Q", 33) + data[at + 8 :]
    assert "rows of 33 elements, not a multiple of Q8_0's 32" in failure_of(tmp_path, odd)


def test_an_unknown_tensor_type_is_refused(tmp_path: Path) -> None:
    data = encode_gguf(small_parts())
    at = data.index(encode_string("first")) + 8 + 5 + 4 + 16
    assert "unknown tensor type 250" in failure_of(
        tmp_path, data[:at] + struct.pack("<I", 250) + data[at + 4 :]
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is an empty file; download it again"),
        (b"GGU", "is only 3 bytes long; download it again"),
        (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "is GGUF version 99; supported are 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a big-endian GGUF"),
        (b"version https://git-lfs.example/spec/v1\noid sha256:0", "is a Git LFS pointer"),
        (b"\n<!DOCTYPE html><title>Sign in", "is an HTML page"),
        (b"<html><body>", "is an HTML page"),
        (b"PK\x03\x04rest", "is a zip archive"),
        (b"tjgg\x03\x00\x00\x00", "is an old GGML file"),
        (struct.pack("<Q", 20) + b'{"__metadata__": {}}', "is a safetensors file"),
        (b'{"error": "not found"}', "is a JSON document"),
        (b"something else", "is not a GGUF file"),
    ],
)
def test_what_is_not_a_gguf_is_called_by_its_name(tmp_path: Path, data: bytes, said: str) -> None:
    assert said in failure_of(tmp_path, data)


def test_folders_and_missing_files_are_called_by_their_name(tmp_path: Path) -> None:
    assert "does not exist" in failure(tmp_path / "missing.gguf")
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    assert "is a directory" in failure(folder)


@posix_only
def test_pipes_and_dangling_links_are_recognised_without_blocking(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe.gguf", tmp_path / "link.gguf"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "gone.gguf")
    assert "is a pipe or a device" in failure(pipe)
    assert "is a symbolic link to a file that does not exist" in failure(link)


@posix_only
def test_a_device_is_not_opened() -> None:
    assert "is a pipe or a device" in failure(Path("/dev/zero"))
