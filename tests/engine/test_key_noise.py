"""The predicted noise of attention scores, against noise that is measured by drawing inputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.architectures.rope import NO_ROPE, plain_rope
from engine.attention import dequantize, quantize, rope_table, rotate
from engine.key_noise import HeadSizes, head_sizes, normed_sizes, score_noise, worst_noise
from engine.kv_format import INT4, INT8, KV_FORMATS, PageFormat
from tests.model_configs import make_config

Floats = NDArray[np.float32]
HEAD, GROUP, HIDDEN, TOKENS = 64, 2, 96, 48
CONFIG = make_config(
    head_size=HEAD,
    hidden_size=HIDDEN,
    num_heads=2 * GROUP,
    num_kv_heads=2,
    attention_scale=HEAD**-0.5,
    ropes=(plain_rope(HEAD, 10_000.0),),
)


def stored(keys: Floats, page_format: PageFormat) -> Floats:
    """[T, KV, D] as the pages give them back."""
    out = np.empty_like(keys)
    for token in range(len(keys)):
        for head in range(keys.shape[1]):
            levels, scales = quantize(keys[token, head], page_format)
            wide = np.repeat(levels[None], 16, axis=0)
            out[token, head] = dequantize(
                wide, np.repeat(scales[:, None], 16, axis=1), page_format
            )[0]
    return out


def measured_noise(
    queries: Floats, keys: Floats, biases: tuple[Floats, Floats], page_format: PageFormat
) -> float:
    inputs = np.random.default_rng(1).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    tables, positions = rope_table(CONFIG.ropes[0], TOKENS), np.arange(TOKENS, dtype=np.int32)
    q = rotate((inputs @ queries.T + biases[0]).reshape(TOKENS, -1, HEAD), positions, *tables)
    k = rotate((inputs @ keys.T + biases[1]).reshape(TOKENS, -1, HEAD), positions, *tables)
    error = np.repeat(stored(k, page_format) - k, GROUP, axis=1)
    noise = np.einsum("qhd,khd->hqk", q, error) * CONFIG.attention_scale
    return float(np.sqrt(np.square(noise).mean()))


@pytest.mark.parametrize("kv_format", [INT8, INT4], ids=lambda one: one.name)
@pytest.mark.parametrize("bias", [0.0, 20.0, 150.0])
def test_the_prediction_is_of_the_size_of_what_is_measured(kv_format: object, bias: float) -> None:
    assert kv_format in (INT8, INT4)
    page_format = INT8.keys if kv_format is INT8 else INT4.keys
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((4 * HEAD, HIDDEN)).astype(np.float32) / np.float32(8)
    keys = rng.standard_normal((2 * HEAD, HIDDEN)).astype(np.float32) / np.float32(8)
    query_bias, key_bias = np.zeros(4 * HEAD, np.float32), np.zeros(2 * HEAD, np.float32)
    key_bias[[7, HEAD + 40]] = bias
    ones = np.ones(HIDDEN, np.float32)
    predicted = score_noise(
        CONFIG,
        head_sizes(queries, query_bias, ones, HEAD),
        head_sizes(keys, key_bias, ones, HEAD),
        page_format,
    )
    measured = measured_noise(queries, keys, (query_bias, key_bias), page_format)
    assert 0.5 < predicted / measured < 2.0


def sizes(num_heads: int, deviation: float = 1.0) -> HeadSizes:
    shape = (num_heads, HEAD)
    return HeadSizes(np.zeros(shape, np.float32), np.full(shape, deviation, np.float32))


def test_noise_grows_with_queries_and_with_the_largest_key_dimension() -> None:
    plain = score_noise(CONFIG, sizes(4), sizes(2), INT8.keys)
    assert score_noise(CONFIG, sizes(4, 3.0), sizes(2), INT8.keys) == pytest.approx(3 * plain)
    outlier = sizes(2)
    outlier.means[:, 5] = 50
    assert score_noise(CONFIG, sizes(4), outlier, INT8.keys) > 10 * plain


def test_groups_of_int4_keep_an_outlier_to_themselves() -> None:
    """Where nothing is rotated: queries that look at the other group see no difference."""
    config = replace(CONFIG, ropes=(NO_ROPE,))
    outlier, elsewhere = sizes(2), sizes(4)
    outlier.means[:, 5] = 50
    elsewhere.deviations[:, :32] = 0
    alone = score_noise(config, elsewhere, sizes(2), INT4.keys)
    assert score_noise(config, elsewhere, outlier, INT4.keys) == alone
    assert score_noise(config, elsewhere, outlier, INT8.keys) > score_noise(
        config, elsewhere, sizes(2), INT8.keys
    )


def test_what_is_rounded_to_zero_loses_no_more_than_itself() -> None:
    outlier = sizes(2)
    outlier.means[:, 5] = 1e6
    quiet = sizes(4)
    quiet.deviations[:, [5, 37]] = 0
    lost = score_noise(CONFIG, quiet, outlier, INT4.keys)
    assert lost == pytest.approx(np.sqrt((HEAD - 2) / HEAD))


def test_the_size_of_a_projection_is_that_of_its_rows_and_inputs() -> None:
    weights = np.zeros((HEAD, 3), np.float32)
    weights[0] = [3, 4, 0]
    found = head_sizes(weights, None, np.array([1, 2, 9], np.float32), HEAD)
    assert found.deviations[0, 0] == pytest.approx(np.hypot(3, 8))
    assert not found.means.any()


def test_behind_a_norm_the_size_is_that_of_its_weight() -> None:
    each = normed_sizes(np.full(HEAD, -2, np.float32), num_heads=3, head_size=HEAD)
    assert each.deviations.shape == (3, HEAD)
    assert (each.deviations == 2).all()
    whole = normed_sizes(np.arange(3 * HEAD, dtype=np.float32), num_heads=3, head_size=HEAD)
    assert whole.deviations[1, 0] == HEAD


def test_the_worst_layer_speaks_for_the_model() -> None:
    noise = worst_noise(CONFIG, [(sizes(4), sizes(2)), (sizes(4), sizes(2, 8.0))])
    assert set(noise) == set(KV_FORMATS)
    assert noise["f32"] == 0
    assert noise["int8"] == score_noise(CONFIG, sizes(4), sizes(2, 8.0), INT8.keys)
    assert noise["int8k4v"] == noise["int8"] < noise["int4"]
