"""The runner on a tiny model: a token's logits depend on its own prefix and on nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from engine.batch import Float32Array
from engine.bundle import Bundle
from engine.export.exporter import import_checkpoint
from engine.kv_format import KV_FORMATS
from tests.batches import Span, make_batch
from tests.engine.gguf_files import write_tiny_llama_gguf
from tests.loaded_model import LoadedModel, load_model, spoil

LoadTiny = Callable[..., LoadedModel]
every_format = pytest.mark.parametrize("kv_format", KV_FORMATS)


@pytest.fixture(scope="module")
def load_tiny(tiny_bundle: Bundle) -> LoadTiny:
    """Each combination is loaded once; the pages are garbage again for every test."""
    loaded: dict[tuple[object, ...], LoadedModel] = {}

    def load(kv_format: str, num_threads: int = 1, is_reference: bool = False) -> LoadedModel:
        key = (kv_format, num_threads, is_reference)
        if key not in loaded:
            loaded[key] = load_model(tiny_bundle, kv_format, num_threads, is_reference=is_reference)
        spoil(loaded[key].cache)
        return loaded[key]

    return load


@pytest.fixture(scope="module")
def dense_bundle(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("dense")
    source = write_tiny_llama_gguf(folder / "tiny.gguf")
    return import_checkpoint(
        source, folder / "dense", "dense", lambda *_: None, weight_format="f32"
    )


def random_tokens(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 320, length).tolist()
    return tokens


def blocks(first: int, length: int) -> list[int]:
    return list(range(first, first - (-length // 16)))[::-1]


@every_format
@pytest.mark.parametrize("chunks", [(1,), (2,), (16,), (7, 1, 30), (64, 3), (1, 149)])
def test_a_chunked_prefill_equals_the_whole(
    load_tiny: LoadTiny, kv_format: str, chunks: Sequence[int]
) -> None:
    model, tokens, table = load_tiny(kv_format), random_tokens(150), blocks(3, 150)
    whole = model.logits_of(tokens, table)
    spoil(model.cache, seed=1)
    assert np.array_equal(model.logits_of(tokens, table, chunks), whole)


@every_format
def test_a_mixed_batch_equals_its_sequences_alone(load_tiny: LoadTiny, kv_format: str) -> None:
    model = load_tiny(kv_format)
    lengths, new = [40, 150, 1, 17, 200, 129], [40, 1, 1, 16, 70, 1]
    tables = [blocks(first, n) for first, n in zip([0, 3, 13, 14, 16, 30], lengths, strict=True)]
    tokens = [random_tokens(length, seed) for seed, length in enumerate(lengths)]
    alone = [
        model.logits_of(each, table)[-num_new:]
        for each, table, num_new in zip(tokens, tables, new, strict=True)
    ]
    spans = [
        Span(each[-num_new:], table, len(each) - num_new)
        for each, table, num_new in zip(tokens, tables, new, strict=True)
    ]
    assert np.array_equal(model.logits(*spans), np.concatenate(alone))


@every_format
def test_the_company_of_a_decode_changes_nothing(load_tiny: LoadTiny, kv_format: str) -> None:
    model = load_tiny(kv_format)
    tokens = random_tokens(100)
    model.logits_of(tokens[:99], blocks(0, 100))
    decode = Span(tokens[99:], blocks(0, 100), 99)
    alone = model.logits(decode)
    for number in range(1, 7):
        others = [Span([number], [20 + i]) for i in range(number)]
        assert np.array_equal(model.logits(*others, decode)[-1:], alone)
        assert np.array_equal(model.logits(decode, *others)[:1], alone)


@every_format
def test_a_prefix_hit_equals_a_miss(load_tiny: LoadTiny, kv_format: str) -> None:
    model, prefix = load_tiny(kv_format), random_tokens(96)
    suffixes = [random_tokens(30, seed) for seed in (1, 2)]
    misses = [
        model.logits_of(prefix + suffix, blocks(8 * i, 126))[96:]
        for i, suffix in enumerate(suffixes)
    ]
    shared = blocks(0, 126)[:6]
    hits = [
        model.logits(Span(suffix, [*shared, *blocks(30 + 2 * i, 30)], 96))
        for i, suffix in enumerate(suffixes)
    ]
    assert np.array_equal(hits, misses)


@every_format
def test_where_a_sequence_lies_changes_nothing(load_tiny: LoadTiny, kv_format: str) -> None:
    model, tokens = load_tiny(kv_format), random_tokens(100)
    scattered = [40, 2, 17, 33, 5, 60, 1]
    found = model.logits_of(tokens, scattered, (23,))
    assert np.array_equal(found, model.logits_of(tokens, list(range(50, 57)), (23,)))


@every_format
def test_two_threads_equal_one(load_tiny: LoadTiny, kv_format: str) -> None:
    tokens, others = random_tokens(200), random_tokens(60, 1)
    results: list[tuple[Float32Array, ...]] = []
    for num_threads in (1, 2):
        model = load_tiny(kv_format, num_threads)
        prefill = model.logits(Span(tokens, blocks(0, 200)), Span(others, blocks(20, 60)))
        decode = model.logits(Span([7], [*blocks(0, 200), 30], 200))
        results.append((prefill, decode))
    assert all(np.array_equal(one, two) for one, two in zip(*results, strict=True))


@every_format
def test_the_kernel_equals_the_reference(dense_bundle: Bundle, kv_format: str) -> None:
    """With float32 weights and activations, so that only the pages round."""
    tokens, table = random_tokens(200), blocks(0, 200)
    kernel = load_model(dense_bundle, kv_format).logits_of(tokens, table, (64, 130, 1))
    slow = load_model(dense_bundle, kv_format, is_reference=True)
    difference = float(np.abs(kernel - slow.logits_of(tokens, table, (200,))).max())
    assert difference < MAX_FLIPPED[kv_format], f"the largest difference is {difference:.3g}"


# A rare number lies so near the middle of two levels that the two round it differently.
MAX_FLIPPED = {"f32": 1e-4, "int8": 0.02, "int8k4v": 0.2, "int4": 0.2}


@every_format
def test_a_sequence_that_is_not_finite_harms_no_other(load_tiny: LoadTiny, kv_format: str) -> None:
    model = load_tiny(kv_format)
    spans = [Span(random_tokens(60, seed), blocks(6 * seed, 60)) for seed in range(3)]
    clean = model.logits(*spans)
    decodes = [Span([5], span.table, 60) for span in spans]
    after = model.logits(*decodes)
    bad_block, bad_offset = spans[1].table[1], 4  # position 20
    model.cache.layers[0].key_scales[bad_block, :, :, bad_offset] = np.nan
    found = model.logits(*(Span(s.token_ids[40:], s.table, 40) for s in spans))
    assert np.isnan(found[20:40]).all()
    for each in (0, 2):
        own = slice(20 * each, 20 * each + 20)
        assert np.array_equal(found[own], clean[60 * each + 40 : 60 * each + 60])
    found = model.logits(*decodes)
    assert np.isnan(found[1]).all()
    assert np.array_equal(found[[0, 2]], after[[0, 2]])


def test_blocks_of_a_sequence_that_was_not_finite_can_be_used_again(load_tiny: LoadTiny) -> None:
    model, tokens, table = load_tiny("int8"), random_tokens(40), blocks(0, 40)
    expected = model.logits_of(tokens, table)
    for pages in model.cache.layers:
        pages.key_scales[:] = np.nan
    assert np.array_equal(model.logits_of(tokens, table, (9,)), expected)


def test_only_the_rows_asked_for_are_returned(load_tiny: LoadTiny) -> None:
    model = load_tiny("int8")
    spans = [Span(random_tokens(20, 1), [0, 1]), Span(random_tokens(5, 2), [2])]
    every = model.logits(*spans)
    last = model.runner.execute(make_batch(spans, rows="last"))
    assert np.array_equal(last, every[[19, 24]])
    assert len(model.runner.execute(make_batch(spans, rows="none"))) == 0


def test_a_step_can_be_executed_again(load_tiny: LoadTiny) -> None:
    model = load_tiny("int8")
    model.logits(Span(random_tokens(20), [0, 1, 2]))
    again = Span(random_tokens(20, 1), [0, 1, 2], 20)
    assert np.array_equal(model.logits(again), model.logits(again))
