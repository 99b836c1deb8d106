"""The pieces of attention over quantized pages: exact integers, and the reference's floats."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from llvmlite import ir
from numpy.typing import NDArray

from engine.attention import keys_by_token, unpack, values_by_token
from engine.kernels import attention_products, attention_simd, rounding_simd
from engine.kernels.attention_products import emit_scores, emit_weighted_sum
from engine.kernels.attention_simd import (
    DECAY,
    FACTORS,
    INVERSES,
    PACKED,
    PACKED_GROUP,
    ROW_KEYS,
    SCALE,
    SHIFT,
    weight_floats,
)
from engine.kernels.rounding_simd import query_bytes
from engine.kernels.simd import Emitter
from engine.kv_format import INT4, INT8, PageFormat
from engine.rounded_attention import exp2, round_query, tanh
from tests.engine.test_panel_targets import TARGETS
from tests.engine.test_simd import row_softcap

Float32Array = NDArray[np.float32]
FORMATS = {8: INT8, 4: INT4}
TILE = 128
compiled: Any = numba.njit


@compiled  # type: ignore[untyped-decorator]
def scores(rows: Any, bits: Any, queries: Any, size: int, keys: Any, scales: Any, out: Any) -> None:
    """Of the first two blocks of `keys`."""
    first, second = keys[0].ctypes.data, keys[1].ctypes.data
    attention_products.scores(
        rows, bits, bits, queries.ctypes.data, queries.strides[0], size, out.ctypes.data,
        out.strides[0], first, scales[0].ctypes.data, second, first, second, first, second,
        scales[1].ctypes.data, first, second, first, second,
    )  # fmt: skip


@compiled  # type: ignore[untyped-decorator]
def weighted_sum(
    rows: Any, bits: Any, weights: Any, values: Any, table: Any, first: int, size: int, out: Any
) -> None:
    attention_products.weighted_sum(
        rows, bits, weights.ctypes.data, weights.strides[0], values.ctypes.data, values.strides[0],
        table.ctypes.data, first, table.shape[0], size, out.ctypes.data, out.strides[0],
    )  # fmt: skip


@compiled  # type: ignore[untyped-decorator]
def row_exp2(row: Any) -> Any:
    return attention_simd.row_exp2(row.ctypes.data, 0, 8)


@compiled  # type: ignore[untyped-decorator]
def row_maximum(row: Any, first: int, end: int) -> Any:
    return attention_simd.row_maximum(row.ctypes.data, first, end)


@compiled  # type: ignore[untyped-decorator]
def round_weights(row: Any, scales: Any, table: Any, first: int, group: int) -> None:
    """`scales` [blocks, G, 16]."""
    arguments = (
        row.ctypes.data, first, table.shape[0], scales[0, group].ctypes.data, scales.strides[0],
        table.ctypes.data, group,
    )  # fmt: skip
    attention_simd.scale_weights(*arguments)
    attention_simd.pack_weights(*arguments)


@compiled  # type: ignore[untyped-decorator]
def rounded(x: Any, num_groups: int, bias: int, out: Any) -> None:
    rounding_simd.round_query(x.ctypes.data, x.shape[0], num_groups, bias, out.ctypes.data)


def pages_of(shape: tuple[int, ...], kind: PageFormat, seed: int = 0) -> np.ndarray:
    """Random bytes, every level among them."""
    content = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return content.view(kind.dtype)


def parts_of(query: NDArray[np.uint8], size: int, num_groups: int) -> tuple[Any, Any, Any]:
    """Levels, biases and the scale of a rounded query."""
    high, low = query[: 2 * size].view(np.int8).reshape(2, size).astype(np.int64)
    rest = query[2 * size : query_bytes(size, num_groups)]
    return 256 * high + low, rest[:-4].view(np.int32), rest[-4:].view(np.float32)[0]


def float_row(num_groups: int = 1) -> Float32Array:
    return np.zeros(weight_floats(num_groups), np.float32)


@pytest.mark.parametrize(("num_groups", "bias"), [(1, 128), (2, 8)])
@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e6])
def test_a_query_is_rounded_as_the_reference_rounds_it(
    num_groups: int, bias: int, spread: float
) -> None:
    x = np.random.default_rng(1).standard_normal(64, np.float32) * np.float32(spread)
    out = np.zeros(query_bytes(64, num_groups), np.uint8)
    rounded(x, num_groups, bias, out)
    levels, biases, scale = parts_of(out, 64, num_groups)
    expected, expected_scale = round_query(x[None])
    assert np.array_equal(levels, expected[0]) and scale == expected_scale[0, 0]
    assert np.abs(levels).max() == 32639
    assert np.array_equal(biases, -bias * levels.reshape(num_groups, -1).sum(axis=1))
    assert np.abs(levels * scale - x).max() <= scale * np.float32(0.5001)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_a_query_that_is_not_finite_has_no_scale_and_one_of_zeros_has(bad: float) -> None:
    x, out = np.zeros(32, np.float32), np.zeros(query_bytes(32, 1), np.uint8)
    rounded(x, 1, 128, out)
    levels, biases, scale = parts_of(out, 32, 1)
    assert not levels.any() and not biases.any() and scale == 1
    x[[3, 20]] = 5, bad
    rounded(x, 1, 128, out)
    levels, biases, scale = parts_of(out, 32, 1)
    assert not levels.any() and not biases.any() and np.isnan(scale)
    assert np.isnan(round_query(x[None])[1]).all()


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize(("bits", "size"), [(8, 16), (8, 80), (8, 256), (4, 32), (4, 256)])
def test_scores_are_exact_sums_of_products(bits: int, size: int, num_rows: int) -> None:
    """Also where every query and key is as large as can be, and the sum as well."""
    kind = FORMATS[bits].keys
    groups = kind.num_groups(size)
    x = np.random.default_rng(2).standard_normal((num_rows, size), np.float32)
    x[0] = 1.0
    queries = np.zeros((num_rows, query_bytes(size, groups)), np.uint8)
    for row, query in zip(x, queries, strict=True):
        rounded(row, groups, kind.bias, query)
    keys = pages_of((2, *kind.key_shape(size)), kind)
    keys[1] = 255
    scales = np.ones((2, groups, 16), np.float32)
    scales[:] = 2.0 ** -np.arange(16)
    out = np.zeros((num_rows, 32), np.float32)
    scores((0,) * num_rows, (0,) * bits, queries, size, keys, scales, out)
    levels = unpack(keys_by_token(keys), kind).astype(np.int64).reshape(32, groups, -1)
    q = np.stack([parts_of(query, size, groups)[0] for query in queries])
    products = np.einsum("rgd,tgd->rgt", q.reshape(num_rows, groups, -1), levels)
    assert np.abs(products).max() == 32639 * size // groups * levels.max()
    expected = np.zeros((num_rows, 32), np.float64)
    for group in range(groups):  # powers of two are exact factors
        expected = (expected + products[:, group].astype(np.float32) * 1.0).astype(np.float32)
    assert np.array_equal(out, expected * np.tile(2.0 ** -np.arange(16), 2))


@pytest.mark.parametrize("num_rows", [1, 3, 7, 8])
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize(("bits", "size"), [(8, 16), (8, 64), (8, 80), (4, 32), (4, 96)])
def test_sums_are_exact_whatever_the_table_says(
    bits: int, size: int, first: int, num_rows: int
) -> None:
    kind = FORMATS[bits].values
    groups, table = kind.num_groups(size), np.array([4, 1, 0, 8, 5, 2, 3, 7], np.int32)
    values = pages_of((9, *kind.value_shape(size)), kind)
    rows = np.zeros((num_rows, weight_floats(groups)), np.float32)
    weights = np.random.default_rng(3).integers(0, 65536, (num_rows, groups, TILE))
    weights[0] = 65535
    packed = rows.view(np.uint8)[:, PACKED:].reshape(num_rows, groups, PACKED_GROUP)
    packed[..., :TILE], packed[..., ROW_KEYS:][..., :TILE] = weights >> 8, weights & 255
    factors = 2.0 ** -np.arange(1, groups + 1)
    rows[:, DECAY // 4] = 0.5
    rows[:, FACTORS // 4 :][:, :groups] = factors
    before = np.random.default_rng(4).standard_normal((num_rows, size), np.float32)
    out = before.copy()
    weighted_sum((0,) * num_rows, (0,) * bits, rows, values, table, first, size, out)
    by_token = unpack(values_by_token(values[table[first:]]), kind).astype(np.int64)
    by_group = by_token.reshape(-1, groups, size // groups)
    sums = np.einsum("rgt,tgd->rgd", weights[:, :, 16 * first :], by_group)
    scaled = (sums.astype(np.float32) * factors[:, None]).reshape(num_rows, size)
    assert np.array_equal(out, (scaled + np.float64(0.5) * before).astype(np.float32))


def test_powers_of_two_are_exact_where_the_softmax_needs_it_and_near_elsewhere() -> None:
    row = float_row()
    row[SCALE // 4] = 1
    for start in np.linspace(-126, 0, 400):
        x = np.linspace(start - 0.6, start, TILE).astype(np.float32)
        row[:TILE] = x
        row_exp2(row)
        near = x > -126
        assert np.abs(row[:TILE] / np.exp2(x.astype(np.float64)) - 1)[near].max(initial=0) < 2e-7
        assert np.array_equal(row[:TILE][near], exp2(x)[near])
    row[:4] = 0, -127, -np.inf, np.nan
    row_exp2(row)
    assert row[0] == 1 and row[1] == row[2] == 0 and np.isnan(row[3])


def test_a_row_of_powers_is_scaled_shifted_and_summed() -> None:
    row = float_row()
    x = np.random.default_rng(5).standard_normal(TILE, np.float32)
    row[:TILE], row[SCALE // 4], row[SHIFT // 4] = x, 3.0, 2.0
    total = row_exp2(row)
    assert np.allclose(row[:TILE], np.exp2(3.0 * x - 2.0), rtol=1e-6, atol=0)
    assert np.isclose(total, row[:TILE].sum(dtype=np.float64), rtol=1e-6, atol=0)
    row[:TILE] = x
    row[40] = np.nan
    assert np.isnan(row_exp2(row))


def test_the_largest_score_passes_over_nans_and_other_vectors() -> None:
    row = float_row()
    row[:TILE] = np.arange(TILE)
    assert row_maximum(row, 1, 3) == 47
    row[47] = np.nan
    assert row_maximum(row, 1, 3) == 46
    row[16:48] = np.nan
    assert row_maximum(row, 1, 3) == -np.inf


def test_the_hyperbolic_tangent_of_the_reference_is_that_of_the_kernels() -> None:
    x = np.concatenate([np.linspace(-12, 12, 32_000), np.linspace(-1e-3, 1e-3, 16)])
    row = x.astype(np.float32)
    expected = tanh(row)
    row_softcap(row, np.float32(1))
    assert np.array_equal(row, expected)


@pytest.mark.parametrize("first", [0, 1, 6])
@pytest.mark.parametrize("num_blocks", [7, 8])
def test_weights_are_rounded_relative_to_the_largest(first: int, num_blocks: int) -> None:
    rng, groups = np.random.default_rng(6), 2
    table = np.array([4, 1, 0, 8, 5, 2, 3, 7], np.int32)[:num_blocks]
    scales = rng.random((9, groups, 16), np.float32)
    row = float_row(groups)
    row[:TILE] = rng.random(TILE, np.float32)
    row[16 * first] = 0
    seen = slice(16 * first, 16 * num_blocks)
    for group in range(groups):
        round_weights(row, scales, table, first, group)
        x = row[seen] * scales[table[first:], group].reshape(-1)
        packed = row.view(np.uint8)[PACKED + group * PACKED_GROUP :].astype(np.int64)
        weights = 256 * packed[:ROW_KEYS][seen] + packed[ROW_KEYS : 2 * ROW_KEYS][seen]
        factor, inverse = row[FACTORS // 4 + group], row[INVERSES // 4 + group]
        assert weights.max() == 65535 and weights[0] == 0
        assert np.array_equal(weights, np.rint(x.astype(np.float64) * inverse))
        assert np.abs(weights * factor - x).max() <= 0.51 * x.max() / 65535


def test_weights_too_small_to_have_an_inverse_are_zeros() -> None:
    row = float_row()
    row[:TILE] = 1e-25
    round_weights(row, np.full((8, 1, 16), 1e-6, np.float32), np.arange(8, dtype=np.int32), 0, 0)
    assert row[FACTORS // 4] == 0 and not row.view(np.uint8)[PACKED : PACKED + TILE].any()


@pytest.fixture(scope="module")
def all_targets() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("bits", [8, 4])
def test_products_compile_to_the_dot_product_of_every_machine(
    all_targets: None, bits: int, kind: str
) -> None:
    triple, features, instruction = TARGETS[kind]
    module = ir.Module()
    module.triple = triple
    for name, count in (("scores", 17), ("weighted_sum", 10)):
        signature = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * count)
        function = ir.Function(module, signature, name)
        builder = ir.IRBuilder(function.append_basic_block())
        if name == "scores":
            emit_scores(Emitter(builder), kind, (bits, bits), 3, *function.args)
        else:
            emit_weighted_sum(Emitter(builder), kind, bits, 3, *function.args)
        builder.ret_void()
    target: Any = llvm.Target.from_triple(triple)
    machine = target.create_target_machine(features=features, opt=2)
    assembly = str(machine.emit_assembly(llvm.parse_assembly(str(module))))
    for body in assembly.split("weighted_sum:"):
        assert instruction in body
