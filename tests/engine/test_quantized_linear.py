"""AWQ, GPTQ and compressed-tensors: every weight equals the published formula, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import ImportFailed
from engine.export.packing import pack_blocks, unpack
from engine.importers.quantization import Quantization, read_quantization
from engine.importers.quantized_linear import QuantizedLinear, is_quantized
from engine.importers.tensor_store import TensorStore, open_tensors
from tests.engine.hf_folders import write_safetensors
from tests.engine.quantized_files import (
    Arrays,
    Layer,
    awq_gemm,
    awq_gemv,
    compressed,
    gptq,
    random_layer,
)

ROWS, COLS = 24, 256
GROUP_SIZES = (0, 32, 64, 128)


def store_of(folder: Path, tensors: Arrays) -> TensorStore:
    return open_tensors(write_safetensors(folder / "model.safetensors", tensors))


def linear(
    folder: Path, tensors: Arrays, quantization: Quantization, layer: Layer
) -> QuantizedLinear:
    rows, cols = layer.values.shape
    return QuantizedLinear(store_of(folder, tensors), "a", quantization, (rows, cols))


def check(layer: Layer, found: QuantizedLinear) -> None:
    """The formula, rows that begin anywhere, and the blocks that devices get."""
    weights, num_rows = layer.weights(), len(layer.values)
    assert np.array_equal(found.read(0, num_rows).dequantize(), weights)
    assert np.array_equal(found.read(3, 13).dequantize(), weights[3:13])
    blocks = found.read(0, num_rows).blocks()
    assert blocks is not None
    assert np.array_equal(blocks.dequantize(), weights)
    assert np.array_equal(unpack(pack_blocks(blocks)), weights)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_awq_packed_for_gemm(tmp_path: Path, group_size: int) -> None:
    layer = random_layer(ROWS, COLS, group_size)
    quantization = Quantization("awq", 4, group_size)
    check(layer, linear(tmp_path, awq_gemm("a", layer), quantization, layer))


@pytest.mark.parametrize(("group_size", "width"), [(128, 1), (64, 2), (32, 4)])
def test_awq_packed_for_gemv(tmp_path: Path, group_size: int, width: int) -> None:
    layer = random_layer(ROWS, COLS, group_size)
    quantization = Quantization("awq", 4, group_size, packing="gemv")
    check(layer, linear(tmp_path, awq_gemv("a", layer, width), quantization, layer))


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_gptq(tmp_path: Path, group_size: int, bits: int, version: int, is_symmetric: bool) -> None:
    layer = random_layer(ROWS, COLS, group_size, bits, is_symmetric=is_symmetric)
    quantization = Quantization("gptq", bits, group_size, zero_offset=2 - version)
    found = linear(tmp_path, gptq("a", layer, version), quantization, layer)
    check(layer, found)
    if is_symmetric and bits > 2:
        blocks = found.read(0, ROWS).blocks()
        assert blocks is not None and pack_blocks(blocks).zero_points is None


def test_a_gptq_zero_of_16_takes_8_bits_and_stays_exact(tmp_path: Path) -> None:
    """The first version of the format stores zeros less one, so 15 means 16."""
    layer = random_layer(ROWS, COLS, 128)
    layer.zeros[5, 1] = 16
    found = linear(tmp_path, gptq("a", layer), Quantization("gptq", 4, 128, zero_offset=1), layer)
    check(layer, found)
    blocks = found.read(0, ROWS).blocks()
    assert blocks is not None and blocks.bits == 8


def test_act_order_is_read_exactly_though_it_has_no_blocks(tmp_path: Path) -> None:
    layer = random_layer(ROWS, COLS, 64)
    shuffled = np.random.default_rng(1).permutation(layer.group_of)
    layer = Layer(4, layer.values, layer.zeros, layer.scales, shuffled)
    found = linear(tmp_path, gptq("a", layer), Quantization("gptq", 4, 64, zero_offset=1), layer)
    grouped = found.read(0, ROWS)
    assert np.array_equal(grouped.dequantize(), layer.weights())
    assert grouped.blocks() is None


def test_an_order_that_keeps_runs_of_inputs_together_has_blocks(tmp_path: Path) -> None:
    layer = random_layer(ROWS, COLS, 64)
    moved = np.concatenate([layer.group_of[128:], layer.group_of[:128]])
    layer = Layer(4, layer.values, layer.zeros, layer.scales, moved)
    check(
        layer, linear(tmp_path, gptq("a", layer), Quantization("gptq", 4, 64, zero_offset=1), layer)
    )


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_compressed_tensors(tmp_path: Path, group_size: int, bits: int, is_symmetric: bool) -> None:
    layer = random_layer(ROWS, COLS, group_size, bits, is_symmetric=is_symmetric)
    quantization = Quantization("compressed-tensors", bits, group_size, is_symmetric=is_symmetric)
    check(layer, linear(tmp_path, compressed("a", layer, is_symmetric), quantization, layer))


def test_a_last_group_that_is_cut_off(tmp_path: Path) -> None:
    layer = random_layer(16, 192, 128)
    check(layer, linear(tmp_path, awq_gemm("a", layer), Quantization("awq", 4, 128), layer))


def test_layers_that_were_left_alone_are_told_apart(tmp_path: Path) -> None:
    layer = random_layer(8, 64, 32)
    tensors = awq_gemm("a", layer) | {"b.weight": layer.weights()}
    store = store_of(tmp_path, tensors | compressed("c", layer, True))
    assert [is_quantized(store, base) for base in "abc"] == [True, False, True]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("a.qzeros"), "tensor 'a.qzeros' is missing"),
        (lambda t: t.update({"a.scales": t["a.scales"][:-1]}), "'a.scales' .* does not fit"),
        (lambda t: t.update({"a.g_idx": t["a.g_idx"][1:]}), "'a.g_idx' .* does not fit"),
        (lambda t: t.update({"a.g_idx": t["a.g_idx"] + 9}), "groups from 0 to 3"),
        (lambda t: t.update({"a.qweight": t["a.qweight"].astype("i8")}), "32-bit integers"),
        (lambda t: t.update({"a.scales": t["a.scales"].astype("i4")}), "stored as I32; supported"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: Any, said: str) -> None:
    layer = random_layer(ROWS, COLS, 64)
    tensors = {name: array.copy() for name, array in gptq("a", layer).items()}
    change(tensors)
    with pytest.raises(ImportFailed, match=said):
        linear(tmp_path, tensors, Quantization("gptq", 4, 64, 1), layer).read(0, ROWS)


SCHEME = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (None, None),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, Quantization("awq", 4, 64)),
        (
            {"quant_method": "awq", "bits": 4, "group_size": -1, "version": "GEMV"},
            Quantization("awq", 4, 0, packing="gemv"),
        ),
        ({"quant_method": "gptq", "bits": 8}, Quantization("gptq", 8, 128, zero_offset=1)),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
            Quantization("gptq", 4, 32),
        ),
        (
            {**PACKED, "config_groups": {"group_0": {"weights": SCHEME, "targets": ["Linear"]}}},
            Quantization("compressed-tensors", 4, 128, is_symmetric=True),
        ),
    ],
)
def test_settings(tmp_path: Path, section: Any, expected: Quantization | None) -> None:
    document = {} if section is None else {"quantization_config": section}
    assert read_quantization(tmp_path, document) == expected


def test_settings_in_the_files_of_older_tools(tmp_path: Path) -> None:
    (tmp_path / "quant_config.json").write_text(json.dumps({"w_bit": 4, "q_group_size": 64}))
    assert read_quantization(tmp_path, {}) == Quantization("awq", 4, 64)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": -1}))
    assert read_quantization(tmp_path, {}) == Quantization("gptq", 4, 0, zero_offset=1)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"quant_method": "fp8"}, "quantized by 'fp8' are not supported; supported: bfloat16"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' are not supported"),
        ({"bits": 4}, "'quant_method' is missing"),
        ("awq", "describes its quantization wrongly"),
        ({"quant_method": "awq", "version": "gemv_fast"}, "packed for 'gemv_fast'"),
        ({"quant_method": "awq", "bits": 3}, "3 bits are not supported, only 4"),
        ({"quant_method": "awq", "bits": "4"}, "'bits' is '4', expected an integer"),
        ({"quant_method": "awq", "bits": 4, "group_size": 24}, "expected -1 or a multiple of 16"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits are not supported, only 2, 4 and 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "format 'marlin'"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "'float-quantized'"),
        ({**PACKED, "config_groups": {}}, "0 quantization schemes"),
        ({**PACKED, "config_groups": {"a": {"weights": {**SCHEME, "num_bits": 3}}}}, "3 bits wide"),
        (
            {**PACKED, "config_groups": {"a": {"weights": SCHEME, "input_activations": {}}}},
            "quantized activations",
        ),
    ],
)
def test_methods_that_are_not_read_are_refused_by_name(
    tmp_path: Path, section: Any, said: str
) -> None:
    with pytest.raises(ImportFailed, match=said):
        read_quantization(tmp_path, {"quantization_config": section})
