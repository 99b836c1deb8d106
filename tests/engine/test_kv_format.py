"""The formats' arithmetic, and the head sizes that they take."""

from __future__ import annotations

import pytest

from engine.errors import DoesNotFit
from engine.kv_format import F32, INT4, INT8, KV_FORMATS, KVFormat


@pytest.mark.parametrize(("kv_format", "num_bytes"), [(F32, 46_800), (INT8, 12_240), (INT4, 7_200)])
def test_bytes_per_token_of_a_real_model(kv_format: KVFormat, num_bytes: int) -> None:
    """30 layers, 3 KV heads of 64: twice (data + scales)."""
    assert kv_format.bytes_per_token(30, 3, 64) == num_bytes


@pytest.mark.parametrize(
    ("kv_format", "stored", "groups"), [(F32, 128, 1), (INT8, 128, 1), (INT4, 64, 4)]
)
def test_elements_and_scales_of_a_head(kv_format: KVFormat, stored: int, groups: int) -> None:
    assert kv_format.stored_size(128) == stored
    assert kv_format.num_groups(128) == groups


def test_formats_are_found_by_name() -> None:
    assert {name: kv_format.name for name, kv_format in KV_FORMATS.items()} == {
        "f32": "f32",
        "int8": "int8",
        "int4": "int4",
    }


@pytest.mark.parametrize("kv_format", [F32, INT8])
def test_floats_and_int8_take_multiples_of_16(kv_format: KVFormat) -> None:
    for head_size in (16, 48, 64, 80, 96, 128, 256):
        kv_format.check(head_size)
    with pytest.raises(DoesNotFit, match=rf"{kv_format.name} needs .* multiple of 16, .* is 72$"):
        kv_format.check(72)


def test_int4_takes_multiples_of_32() -> None:
    INT4.check(96)
    with pytest.raises(DoesNotFit, match=r"int4 needs .* multiple of 32, .* is 80$"):
        INT4.check(80)
