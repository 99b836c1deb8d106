"""Paged attention: the kernel against its numpy reference, and against itself in other batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.architectures.config import LayerConfig, Rope
from engine.architectures.rope import NO_ROPE, plain_rope, yarn_rope
from engine.attention import (
    Attention,
    NumpyAttention,
    dequantize,
    keys_by_token,
    quantize,
    rope_table,
    rotate,
    values_by_token,
)
from engine.batch import Batch, Float32Array
from engine.kernels import attention_kernel
from engine.kernels.attention_kernel import MIN_PARALLEL_PAIRS, KernelAttention, num_pairs
from engine.kv_cache import LayerPages, PagedKVCache
from engine.kv_format import KV_FORMATS, PageFormat
from tests.batches import Span, make_batch
from tests.loaded_model import spoil
from tests.model_configs import make_config

NUM_BLOCKS = 128
MAX_LEN = 1200
pytestmark = pytest.mark.usefixtures("kernels")
# Each number of rows in a tile is a compiled form of its own, so one format alone has all of them.
GROUPS = [(name, 3, 32) for name in KV_FORMATS] + [("int8", group, 32) for group in range(1, 9)]
HEAD_SIZES = [("int8", 3, size) for size in (2, 16, 64, 80, 96, 100, 128, 256)]
HEAD_SIZES += [(name, 3, size) for name in ("f32", "int8k4v", "int4") for size in (64, 100, 128)]
# What models and layers differ in: as fields of the config, for a head of 32.
VARIANTS: dict[str, dict[str, Any]] = {
    "window": {"layers": (LayerConfig(window=37),)},
    "narrow window": {"layers": (LayerConfig(window=1),)},
    "wide window": {"layers": (LayerConfig(window=300),)},
    "softcap": {"attention_softcap": 1.5},
    "scale": {"attention_scale": 0.4},
    "partial rope": {"ropes": (plain_rope(12, 100.0),)},
    "no rope": {"ropes": (NO_ROPE,)},
    "magnitude": {"ropes": (yarn_rope(32, 1e4, 4.0, 300),)},
    "all of it": {
        "layers": (LayerConfig(window=130, rope=1),),
        "ropes": (NO_ROPE, yarn_rope(24, 1e4, 4.0, 300)),
        "attention_softcap": 2.0,
    },
}
SHAPES = [*dict.fromkeys([*GROUPS, *HEAD_SIZES, ("f32", 3, 16), ("int8", 12, 64)])]


class Layer:
    """One layer's attention over pages of its own, garbage at first. Two KV heads."""

    def __init__(
        self,
        kv_format: str,
        group: int,
        head_size: int,
        num_threads: int = 1,
        seed: int = 0,
        **changes: Any,
    ) -> None:
        self.config = make_config(
            head_size=head_size,
            num_heads=2 * group,
            num_kv_heads=2,
            context_length=MAX_LEN,
            **changes,
        )
        self.format = KV_FORMATS[kv_format]
        self.kernel: Attention = KernelAttention(
            self.config, self.format, MAX_LEN, 512, num_threads
        )
        self.reference: Attention = NumpyAttention(self.config, self.format, MAX_LEN)
        cache = PagedKVCache(self.config, self.format, NUM_BLOCKS)
        spoil(cache, seed)
        self.pages = cache.layers[0]

    def copy_of_pages(self) -> LayerPages:
        p = self.pages
        return LayerPages(
            0, p.keys.copy(), p.values.copy(), p.key_scales.copy(), p.value_scales.copy()
        )

    def qkv(self, num_tokens: int, seed: int = 0) -> Float32Array:
        rng = np.random.default_rng(seed)
        return rng.standard_normal((num_tokens, self.config.qkv_size), np.float32)

    def attend(self, qkv: Float32Array, *spans: Span) -> Float32Array:
        return self.run(self.kernel, qkv, make_batch(spans, NUM_BLOCKS - 1))

    def run(self, attention: Attention, qkv: Float32Array, batch: Batch) -> Float32Array:
        size = self.config.num_heads * self.config.head_size
        out = np.full((len(qkv), size), np.nan, np.float32)
        attention.begin(batch)(qkv, self.pages, out)
        return out


def past_table(first: int, length: int) -> list[int]:
    """Blocks in an order that is not theirs in memory."""
    return list(range(first, first - (-length // 16)))[::-1]


def span(length: int, table: Sequence[int], num_past: int = 0) -> Span:
    """What tokens they are does not matter here: queries, keys and values are given."""
    return Span([0] * length, table, num_past)


def fill(layer: Layer, table: Sequence[int], length: int, seed: int) -> None:
    layer.attend(layer.qkv(length, seed), span(length, table))


MIXED = (
    span(37, past_table(0, 37)),
    span(1, past_table(5, 151), 150),
    span(20, past_table(20, 150), 130),
    span(1, past_table(30, 1)),
    span(3, past_table(40, 1103), 1100),
    span(1, past_table(111, 129), 128),
)


def filled_layer(kv_format: str, group: int, head_size: int, **changes: Any) -> Layer:
    """Pages that hold the past of all the mixed sequences."""
    layer = Layer(kv_format, group, head_size, **changes)
    for number, each in enumerate(MIXED):
        for start in range(0, each.num_past, 512):
            size = min(512, each.num_past - start)
            past = span(size, each.table, start)
            layer.attend(layer.qkv(size, 1000 * number + start), past)
    return layer


@pytest.mark.parametrize(("kv_format", "group", "head_size"), SHAPES)
def test_the_kernel_equals_the_reference(kv_format: str, group: int, head_size: int) -> None:
    layer = filled_layer(kv_format, group, head_size)
    # Sums over 256 dimensions round more than those over the usual ones.
    assert_kernel_equals_reference(layer, 2e-6 if head_size < 256 else 3e-6)


@pytest.mark.parametrize("kv_format", ["f32", "int8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_equals_the_reference(kv_format: str, variant: str) -> None:
    assert_kernel_equals_reference(filled_layer(kv_format, 3, 32, **VARIANTS[variant]), 3e-6)


def assert_kernel_equals_reference(layer: Layer, bound: float) -> None:
    decodes = [span(1, each.table, each.num_past) for each in MIXED if each.num_past]
    for spans in (MIXED, decodes):
        batch = make_batch(spans, NUM_BLOCKS - 1)
        qkv, before = layer.qkv(batch.num_tokens), layer.copy_of_pages()
        expected = layer.run(layer.reference, qkv, batch)
        written = layer.copy_of_pages()
        restore(layer.pages, before)
        found = layer.run(layer.kernel, qkv, batch)
        assert_same_pages(layer.pages, written)
        difference = float(np.abs(found - expected).max())
        assert difference < bound, f"the largest difference is {difference:.3g}"


@pytest.mark.parametrize("kv_format", ["int8", "int8k4v", "int4"])
@pytest.mark.parametrize("sharpness", [1, 8])
def test_rounding_queries_and_weights_costs_little(kv_format: str, sharpness: int) -> None:
    """Against exact attention over the same pages, values being of size 1.

    A query's elements err by 2 ** -16 of the largest one at most (3 sharpness / 8), so that 64
    of them, times keys of size 1, put 2.6e-5 sharpness of noise into a score, and four times that
    into the worst; weights err by 2 ** -17 of their tile's largest, which is less.
    """
    layer = Layer(kv_format, 3, 64, attention_scale=sharpness / 8)
    table = past_table(0, 1200)
    for start in (0, 512, 1024):
        size = min(512, 1190 - start)
        layer.attend(layer.qkv(size, start), span(size, table, start))
    qkv = layer.qkv(10)
    found = layer.attend(qkv, span(10, table, 1190))
    exact = exact_attention(layer, qkv, table, 1190)
    error = float(np.abs(found - exact).max())
    assert 1e-8 < error < 1e-4 * sharpness, f"the largest error is {error:.3g}"


def exact_attention(
    layer: Layer, qkv: Float32Array, table: Sequence[int], num_past: int
) -> NDArray[np.float64]:
    """Of new tokens at the end of a sequence whose pages hold them already, in float64."""
    c, p, kinds = layer.config, layer.pages, layer.format
    cos, sin = rope_table(c.ropes[0], MAX_LEN)
    heads = qkv.reshape(len(qkv), -1, c.head_size)[:, : c.num_heads].copy()
    queries = rotate(heads, np.arange(num_past, num_past + len(qkv), dtype=np.int32), cos, sin)
    q = (queries * np.float32(c.attention_scale)).astype(np.float64)
    blocks = list(table)
    keys = dequantize(keys_by_token(p.keys[blocks]), p.key_scales[blocks], kinds.keys)
    values = dequantize(values_by_token(p.values[blocks]), p.value_scales[blocks], kinds.values)
    k, v = (x.swapaxes(0, 1).reshape(c.num_kv_heads, -1, c.head_size) for x in (keys, values))
    out = np.zeros((len(qkv), c.num_heads, c.head_size))
    for token in range(len(qkv)):
        end = num_past + token + 1
        for h in range(c.num_heads):
            head = h // (c.num_heads // c.num_kv_heads)
            scores = k[head, :end].astype(np.float64) @ q[token, h]
            weights = np.exp(scores - scores.max())
            out[token, h] = weights @ v[head, :end] / weights.sum()
    return out.reshape(len(qkv), -1)


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_threads_share_the_spans_of_few_long_contexts(
    kv_format: str, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernel, "MIN_PARALLEL_PAIRS", 1)
    one, several = (Layer(kv_format, 3, 32, num_threads=number) for number in (1, num_threads))
    tables = past_table(0, 1200), past_table(80, 700)
    for layer in (one, several):
        for table, length in zip(tables, (1199, 699), strict=True):
            for start in range(0, length, 512):
                size = min(512, length - start)
                layer.attend(layer.qkv(size, start), span(size, table, start))
    decodes = span(1, tables[0], 1199), span(1, tables[1], 699)
    qkv = one.qkv(2)
    expected = one.attend(qkv, *decodes)
    for _ in range(3):
        assert np.array_equal(several.attend(qkv, *decodes), expected)
    reference = one.run(one.reference, qkv, make_batch(decodes, NUM_BLOCKS - 1))
    assert np.allclose(expected, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_a_query_that_is_not_finite_harms_itself_only(kv_format: str, bad: float) -> None:
    layer, table = Layer(kv_format, 3, 32), past_table(0, 40)
    clean = layer.qkv(40)
    expected = layer.attend(clean, span(40, table))
    spoiled = clean.copy()
    spoiled[20, 32 + 3] = bad  # of the second head
    found = layer.attend(spoiled, span(40, table))
    is_bad = np.zeros(found.shape, bool)
    is_bad[20, 32:64] = True
    assert np.isnan(found[is_bad]).all()
    assert np.array_equal(found[~is_bad], expected[~is_bad])


@pytest.mark.parametrize("variant", ["window", "softcap", "all of it"])
def test_a_variant_gives_the_same_bits_in_every_batch_chunk_and_thread(variant: str) -> None:
    layer = filled_layer("int8", 3, 32, **VARIANTS[variant])
    starts = np.cumsum([0, *(len(each.token_ids) for each in MIXED)])
    qkv = layer.qkv(int(starts[-1]))
    together = layer.attend(qkv, *MIXED)
    for each, begin, end in zip(MIXED, starts[:-1], starts[1:], strict=True):
        assert np.array_equal(layer.attend(qkv[begin:end], each), together[begin:end])
    one, two = (Layer("int8", 3, 32, number, **VARIANTS[variant]) for number in (1, 2))
    table, qkv = past_table(0, 400), one.qkv(400)
    whole = one.attend(qkv, span(400, table))
    assert np.array_equal(two.attend(qkv, span(400, table)), whole)
    for size in (1, 7, 150):
        for start in range(0, 400, size):
            part = qkv[start : start + size]
            found = one.attend(part, span(len(part), table, start))
            assert np.array_equal(found, whole[start : start + size])


def test_what_lies_before_the_window_is_not_seen() -> None:
    """Not even when it is not finite, whichever rows and pages are worked on together."""
    layer = Layer("int8", 3, 32, layers=(LayerConfig(window=40),))
    table, qkv = past_table(0, 300), layer.qkv(300)
    expected = layer.attend(qkv, span(300, table))
    for start in (100, 139, 250):
        for block in table[: (start - 39) // 16]:
            layer.pages.key_scales[block] = np.nan
        found = layer.attend(qkv[start:], span(300 - start, table, start))
        assert np.array_equal(found, expected[start:])


def restore(pages: LayerPages, content: LayerPages) -> None:
    pages.keys[:], pages.values[:] = content.keys, content.values
    pages.key_scales[:], pages.value_scales[:] = content.key_scales, content.value_scales


def assert_same_pages(found: LayerPages, expected: LayerPages) -> None:
    assert np.array_equal(found.keys, expected.keys)
    assert np.array_equal(found.values, expected.values)
    assert np.array_equal(found.key_scales, expected.key_scales, equal_nan=True)
    assert np.array_equal(found.value_scales, expected.value_scales)


@pytest.mark.parametrize(
    ("kv_format", "group"), [*((f, 3) for f in KV_FORMATS), ("int8", 12), ("int8", 16)]
)
def test_a_mixed_batch_equals_its_sequences_alone(kv_format: str, group: int) -> None:
    layer = filled_layer(kv_format, group, 32)
    starts = np.cumsum([0, *(len(each.token_ids) for each in MIXED)])
    qkv = layer.qkv(int(starts[-1]))
    together = layer.attend(qkv, *MIXED)
    for each, begin, end in zip(MIXED, starts[:-1], starts[1:], strict=True):
        assert np.array_equal(layer.attend(qkv[begin:end], each), together[begin:end])


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("size", [1, 2, 7, 16, 50, 128])
def test_a_chunked_prefill_equals_the_whole(kv_format: str, size: int) -> None:
    layer, table = Layer(kv_format, 3, 32), past_table(0, 200)
    qkv = layer.qkv(200)
    whole = layer.attend(qkv, span(200, table))
    pages = layer.copy_of_pages()
    layer = Layer(kv_format, 3, 32, seed=1)
    for start in range(0, 200, size):
        part = qkv[start : start + size]
        chunk = layer.attend(part, span(len(part), table, start))
        assert np.array_equal(chunk, whole[start : start + size])
    used = table[:12]  # the 13th block is not full, and what lies behind is garbage
    assert np.array_equal(layer.pages.keys[used], pages.keys[used])
    assert np.array_equal(layer.pages.values[used], pages.values[used])
    assert np.array_equal(layer.pages.key_scales[used], pages.key_scales[used])
    assert np.array_equal(layer.pages.value_scales[used], pages.value_scales[used])


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_slots_beyond_the_context_change_nothing(kv_format: str) -> None:
    results = []
    for seed in (1, 2):
        layer = Layer(kv_format, 3, 32, seed=seed)
        table = past_table(0, 150)
        fill(layer, table, 133, seed=9)
        results.append(layer.attend(layer.qkv(5), span(5, table, 133)))
    assert np.isfinite(results[0]).all()
    assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_two_threads_equal_one(kv_format: str) -> None:
    one, two = (Layer(kv_format, 3, 32, num_threads=number) for number in (1, 2))
    spans = [span(150, past_table(0, 150)), span(40, past_table(20, 40)), span(1, [50])]
    batch = make_batch(spans, NUM_BLOCKS - 1)
    assert num_pairs(batch) >= MIN_PARALLEL_PAIRS
    qkv = one.qkv(batch.num_tokens)
    found = two.run(two.kernel, qkv, batch)
    assert np.array_equal(found, one.run(one.kernel, qkv, batch))
    assert_same_pages(two.pages, one.pages)


def test_more_threads_than_work_are_harmless() -> None:
    one, eight = (Layer("int8", 3, 32, num_threads=number) for number in (1, 8))
    table = past_table(0, 1200)
    decode = span(1, table, 1199)
    for layer in (one, eight):
        for start in (0, 512, 1024):
            size = min(512, 1199 - start)
            layer.attend(layer.qkv(size, start), span(size, table, start))
    assert np.array_equal(eight.attend(one.qkv(1), decode), one.attend(one.qkv(1), decode))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e31])  # the last is too large
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_a_key_or_value_that_is_not_finite_harms_the_queries_that_see_it_and_no_other(
    kv_format: str, part: str, bad: float
) -> None:
    layer = Layer(kv_format, 3, 32)
    spans = [span(140, past_table(0, 140)), span(30, past_table(10, 30))]
    clean = layer.qkv(170)
    expected = layer.attend(clean, *spans)
    spoiled = clean.copy()
    first_kv = layer.config.num_heads * 32
    spoiled[70, first_kv + (5 if part == "key" else 2 * 32 + 5)] = bad  # of the first KV head
    for attention in (layer.kernel, layer.reference):
        found = layer.run(attention, spoiled, make_batch(spans, NUM_BLOCKS - 1))
        sees = np.zeros((170, 6 * 32), bool)
        sees[70:140, : 3 * 32] = True
        assert np.array_equal(np.isnan(found), sees)
        if attention is layer.kernel:
            assert np.array_equal(found[~sees], expected[~sees])


def test_a_slot_that_was_not_finite_is_good_again_when_it_is_rewritten() -> None:
    layer = Layer("int8", 3, 32)
    qkv, table = layer.qkv(20), past_table(0, 20)
    expected = layer.attend(qkv, span(20, table))
    spoiled = qkv.copy()
    spoiled[3] = np.nan
    assert np.isnan(layer.attend(spoiled, span(20, table))[3:]).all()
    assert np.array_equal(layer.attend(qkv, span(20, table)), expected)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_writing_a_token_touches_its_slot_only(kv_format: str) -> None:
    layer = Layer(kv_format, 3, 32)
    before = layer.copy_of_pages()
    layer.attend(layer.qkv(1), span(1, [9], 5))  # sees garbage; only what it writes counts
    for new, old in zip(slot_of(layer.pages, 9, 5), slot_of(before, 9, 5), strict=True):
        assert not np.array_equal(new, old)
        new[:] = old
    assert_same_pages(layer.pages, before)


def slot_of(pages: LayerPages, block: int, token: int) -> list[np.ndarray]:
    """Views of one token's key, value and their scales."""
    row, column = divmod(token, pages.values.shape[-1])
    return [
        pages.keys[block, :, :, token],
        pages.values[block, :, :, row, :, column],
        pages.key_scales[block, :, :, token],
        pages.value_scales[block, :, :, token],
    ]


FINITE = st.floats(-1e6, 1e6, width=32).map(lambda x: 0.0 if abs(x) < 1e-6 else x)


@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("kv_format", ["int8", "int4"])
@given(values=st.lists(FINITE, min_size=64, max_size=64))
@settings(deadline=None, max_examples=50)
def test_quantizing_errs_by_half_a_step_at_most(
    kv_format: str, part: str, values: list[float]
) -> None:
    x, kind = np.array(values, np.float32), getattr(KV_FORMATS[kv_format], part)
    stored, scales = quantize(x, kind)
    back = dequantize_one(stored, scales, kind)
    steps = np.repeat(scales, 64 // len(scales))
    assert (np.abs(back - x) <= steps * np.float32(0.5001)).all()
    largest = np.abs(x.reshape(len(scales), -1)).max(axis=1)
    assert np.allclose(scales * np.float32(kind.max_level), largest, rtol=1e-6, atol=0)


def dequantize_one(stored: np.ndarray, scales: Float32Array, kind: PageFormat) -> Float32Array:
    """`dequantize` of a block of 16 equal tokens, and the first of them."""
    block = np.repeat(stored[None], 16, axis=0)
    found: Float32Array = dequantize(block, np.repeat(scales[:, None], 16, axis=1), kind)
    assert (found == found[0]).all()
    first: Float32Array = found[0]
    return first


def test_f32_pages_keep_every_bit() -> None:
    x = np.random.default_rng(0).standard_normal(64, np.float32)
    kind = KV_FORMATS["f32"].keys
    assert np.array_equal(dequantize_one(*quantize(x, kind), kind), x)


def test_the_rope_table_holds_cosines_and_sines_of_the_papers_angles() -> None:
    cos, sin = rope_table(plain_rope(8, 100.0), 50)
    assert cos.shape == sin.shape == (50, 4) and cos.dtype == np.float32
    assert np.array_equal(cos[0], [1, 1, 1, 1]) and np.array_equal(sin[0], [0, 0, 0, 0])
    angle = 7 * 100.0 ** (-2 * 3 / 8)
    assert cos[7, 3] == np.float32(np.cos(angle)) and sin[7, 3] == np.float32(np.sin(angle))


def test_partial_and_absent_rotation_have_narrow_tables() -> None:
    assert rope_table(plain_rope(6, 100.0), 50)[0].shape == (50, 3)
    assert rope_table(NO_ROPE, 50)[1].shape == (50, 0)


def test_long_frequencies_are_those_of_an_engine_with_long_sequences() -> None:
    rope = Rope((1.0,), long_frequencies=(0.5,), original_length=50, magnitude=2.0)
    short, long = rope_table(rope, 50)[0], rope_table(rope, 51)[0]
    assert short[3, 0] == np.float32(2 * np.cos(3.0)) and long[3, 0] == np.float32(2 * np.cos(1.5))


def test_pairs_are_counted_for_decode_and_prefill() -> None:
    decode = make_batch([span(1, [0], 9), span(1, [1], 4)])
    assert num_pairs(decode) == 15
    mixed = make_batch([span(10, [0]), span(1, [1], 4)])
    assert num_pairs(mixed) == 105


@pytest.mark.parametrize("size", [64, 256, 512])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_a_row_of_scratch_holds_a_head(kv_format: str, size: int) -> None:
    """Writing a token keeps its head there."""
    scratch = attention_kernel.make_scratch(KV_FORMATS[kv_format], size, 1, 0, 0)
    assert scratch.weights.shape[2] >= size
