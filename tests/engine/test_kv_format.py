"""The formats' arithmetic: bytes, scales, and what pads a head."""

from __future__ import annotations

import pytest

from engine.kv_format import F32, INT4, INT8, INT8_KEYS_INT4_VALUES, KV_FORMATS, KVFormat


@pytest.mark.parametrize(
    ("kv_format", "num_bytes"),
    [(F32, 46_800), (INT8, 12_240), (INT8_KEYS_INT4_VALUES, 9_720), (INT4, 7_200)],
)
def test_bytes_per_token_of_a_real_model(kv_format: KVFormat, num_bytes: int) -> None:
    """30 layers, 3 KV heads of 64: data + scales of a key and a value."""
    assert kv_format.bytes_per_token(30, 3, 64) == num_bytes


@pytest.mark.parametrize(
    ("kv_format", "stored", "groups"), [(F32, 128, 1), (INT8, 128, 1), (INT4, 64, 4)]
)
def test_elements_and_scales_of_a_head(kv_format: KVFormat, stored: int, groups: int) -> None:
    for part in (kv_format.keys, kv_format.values):
        assert (part.stored_size(128), part.num_groups(128)) == (stored, groups)


def test_formats_are_found_by_name() -> None:
    assert {name: kv_format.name for name, kv_format in KV_FORMATS.items()} == {
        name: name for name in ("f32", "int8", "int8k4v", "int4")
    }


@pytest.mark.parametrize("kv_format", [F32, INT8])
def test_floats_and_int8_are_padded_to_multiples_of_16(kv_format: KVFormat) -> None:
    sizes = [(1, 16), (16, 16), (72, 80), (80, 80), (100, 112), (256, 256)]
    assert [(size, kv_format.padded_size(size)) for size, _ in sizes] == sizes


@pytest.mark.parametrize("kv_format", [INT4, INT8_KEYS_INT4_VALUES])
def test_what_has_4_bits_is_padded_to_multiples_of_32(kv_format: KVFormat) -> None:
    sizes = [(1, 32), (64, 64), (80, 96), (96, 96), (100, 128)]
    assert [(size, kv_format.padded_size(size)) for size, _ in sizes] == sizes
