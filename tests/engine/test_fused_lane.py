"""The fused form: attention inside the graphs, over a packed window.

On the CPU provider its graphs compute in fp32, so they must agree with the segments almost to the
rounding: that proves windows, masks, rotation and pages. In the emulator, compiled for both chips,
they must agree with the segment form within the bound of fp16, and to the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.batch import Float32Array
from engine.bundle import Bundle
from engine.embedding import Embedding
from engine.export.model import load_weights
from engine.kernels.attention_kernel import KernelAttention
from engine.kv_cache import PagedKVCache
from engine.kv_format import F32, KV_FORMATS, KVFormat
from engine.model_runner import ModelRunner
from engine.npu.fused_lane import FusedLane
from engine.npu.lane import NpuLane
from engine.span import Category
from engine.span_recorder import SpanRecorder
from engine.step_form import StepForm
from tests.batches import Span, make_batch
from tests.emulator import (
    emulated_fused_graphs,
    emulated_graphs,
    reference_fused_graphs,
    reference_graphs,
    relative_rms,
)
from tests.loaded_model import NanEmbedding
from tests.tiny_model import import_tiny_model
from tests.traces import assert_nested

TOKENS, WINDOWS, HEADS = (1, 8, 32), (16, 128), (1, 8)
MAX_ROWS, NUM_BLOCKS = 64, 64

# Relative RMS of logits: fp32 against fp32 in another order; pages that round once more (the fused
# form sees a step's own keys before they are quantized; 4 bits in a random model are few); fp16.
MAX_ROUNDING, MAX_FP16 = 2e-5, 4e-3
# Logits are of order one. What fp16 changes in them is far below this.
CLEAR_MARGIN = 0.03
MAX_PAGES = {"f32": MAX_ROUNDING, "int8": 1.5e-2, "int8k4v": 0.25, "int4": 0.25}


class Forms:
    """Forms over one set of pages."""

    def __init__(self, bundle: Bundle, kv_format: KVFormat, nan_token: int | None = None) -> None:
        self.bundle = bundle
        self.config = bundle.config
        self.cache = PagedKVCache(self.config, kv_format, NUM_BLOCKS)
        matrix = load_weights(bundle.path).embed
        self.embedding: Embedding = NanEmbedding(bundle.weights_path, matrix, 1.0, nan_token)
        length = self.config.context_length
        self._attention = KernelAttention(self.config, kv_format, length, 128, 1)

    def segments(self, lane: NpuLane) -> StepForm:
        return ModelRunner(lane, self._attention, self.embedding, self.cache)

    def fused(self, soc_model: int | None, layers_per_graph: int = 2) -> FusedLane:
        """On the CPU provider without `soc_model`."""
        shape = (layers_per_graph, TOKENS, WINDOWS, HEADS)
        graphs = (
            reference_fused_graphs(self.bundle, *shape)
            if soc_model is None
            else emulated_fused_graphs(self.bundle, soc_model, *shape)
        )
        length = self.config.context_length
        return FusedLane(self.config, graphs, "fused", self.embedding, self.cache, length, MAX_ROWS)


def run(form: StepForm, *spans: Span, rows: str = "all") -> Float32Array:
    batch = make_batch(spans, NUM_BLOCKS - 1, rows)
    assert form.fits(batch)
    return form.execute(batch).copy()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, 320, length).tolist()
    return tokens


def many_steps(form: StepForm) -> Float32Array:
    """Ragged prompts, chunks over page boundaries, decodes of many, and a lone one."""
    prompts = [prompt_of(length, length) for length in (5, 30, 17)]
    tables = [[0, 1], [4, 2, 3], [9, 8]]
    logits = [run(form, *(Span(p, t) for p, t in zip(prompts, tables, strict=True)))]
    decodes = [Span([7 + i], tables[i], len(p)) for i, p in enumerate(prompts)]
    logits.append(run(form, *decodes))
    chunk = Span(prompt_of(12, 9), tables[1], 31)
    logits.append(run(form, decodes[0], chunk))
    logits.append(run(form, Span([5], tables[1], 43)))
    return np.concatenate(logits)


@pytest.fixture(scope="module")
def segments_lane(tiny_bundle: Bundle) -> NpuLane:
    graphs = reference_graphs(tiny_bundle, (32,), (8,))
    return NpuLane(tiny_bundle.config, graphs, "reference", 128, MAX_ROWS)


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("layers_per_graph", [1, 2])
def test_it_computes_what_the_segments_compute(
    tiny_bundle: Bundle, segments_lane: NpuLane, name: str, layers_per_graph: int
) -> None:
    expected = many_steps(Forms(tiny_bundle, KV_FORMATS[name]).segments(segments_lane))
    forms = Forms(tiny_bundle, KV_FORMATS[name])
    found = many_steps(forms.fused(None, layers_per_graph))
    error = relative_rms(found, expected)
    assert error < MAX_PAGES[name], f"relative RMS {error:.2e}"


def test_a_recorder_is_told_of_its_calls_and_of_what_the_host_does_between(
    tiny_bundle: Bundle,
) -> None:
    form, recorder = Forms(tiny_bundle, F32).fused(None, layers_per_graph=1), SpanRecorder()
    form.record(recorder)
    run(form, Span(prompt_of(9), [0]), rows="last")
    spans = recorder.take().spans
    num_pieces = len([s for s in spans if s.args.get("bucket") in TOKENS and s.name != "head of 1"])
    assert num_pieces >= 2 and num_pieces % 2 == 0, "each piece goes through both layers"
    kinds = [s.category for s in spans]
    each = [Category.ATTENTION, Category.NPU_CALL, Category.ATTENTION]
    assert kinds == each * num_pieces + [Category.NPU_CALL]
    assert {s.name for s in spans if s.category is Category.ATTENTION} == {
        "gather pages", "write pages",
    }  # fmt: skip
    assert form.counters.num_calls == kinds.count(Category.NPU_CALL)
    assert_nested(spans)


def test_its_pages_are_those_of_the_segments(tiny_bundle: Bundle, segments_lane: NpuLane) -> None:
    """So that any form can take over after any step."""
    forms = [Forms(tiny_bundle, F32) for _ in range(2)]
    many_steps(forms[0].segments(segments_lane))
    many_steps(forms[1].fused(None))
    for ours, theirs in zip(forms[1].cache.layers, forms[0].cache.layers, strict=True):
        for array, other in zip(ours.arrays, theirs.arrays, strict=True):
            assert np.allclose(array.astype(float), other.astype(float), rtol=0, atol=1e-4)


def test_forms_can_follow_each_other(tiny_bundle: Bundle, segments_lane: NpuLane) -> None:
    prompt, table = prompt_of(40), [0, 1, 2]
    forms = Forms(tiny_bundle, F32)
    segments, fused = forms.segments(segments_lane), forms.fused(None)
    expected = run(segments, Span(prompt, table))
    for first, second in ((segments, fused), (fused, segments)):
        found = [run(first, Span(prompt[:17], table)), run(second, Span([prompt[17]], table, 17))]
        found += [run(first, Span(prompt[18:25], table, 18))]
        found += [run(second, Span(prompt[25:], table, 25))]
        assert relative_rms(np.concatenate(found), expected) < MAX_ROUNDING


def test_only_the_rows_asked_for_are_returned_in_their_order(tiny_bundle: Bundle) -> None:
    fused = Forms(tiny_bundle, F32).fused(None)
    spans = [Span(prompt_of(40, 1), [0, 1, 2]), Span(prompt_of(5, 2), [3])]
    every = run(fused, *spans)
    last = fused.execute(make_batch(spans, NUM_BLOCKS - 1, rows="last"))
    np.testing.assert_allclose(last, every[[39, 44]], atol=1e-5)
    assert len(fused.execute(make_batch(spans, NUM_BLOCKS - 1, rows="none"))) == 0


def test_a_batch_whose_window_has_no_room_does_not_fit(tiny_bundle: Bundle) -> None:
    fused = Forms(tiny_bundle, F32).fused(None)
    table = list(range(9))
    assert fused.fits(make_batch([Span([1], table, 128)]))
    assert not fused.fits(make_batch([Span([1], table, 129)]))
    assert not fused.fits(make_batch([Span([1], table, 100), Span([1], table, 29)]))
    assert fused.fits(
        make_batch([Span(prompt_of(140), table)])
    )  # pieces of 32: 128 before the last


def test_a_sequence_that_is_not_finite_harms_no_other(tiny_bundle: Bundle) -> None:
    clean = Forms(tiny_bundle, F32)
    nan_token = 311
    forms = Forms(tiny_bundle, F32, nan_token)
    spans = [Span([9, *prompt_of(4, seed)], [2 * seed, 2 * seed + 1]) for seed in range(3)]
    expected = run(clean.fused(None), *spans)
    fused = forms.fused(None)
    bad = Span([9, nan_token, *spans[1].token_ids[2:]], spans[1].table)
    found = run(fused, spans[0], bad, spans[2])
    assert np.isnan(found[6:10]).all()
    np.testing.assert_allclose(
        found[[0, 1, 2, 3, 4, 10, 11, 12, 13, 14]], np.delete(expected, range(5, 10), 0), atol=1e-5
    )
    decodes = [Span([5], span.table, 5) for span in spans]
    found, expected = run(fused, *decodes), run(clean.fused(None), *decodes)
    assert np.isnan(found[1]).all()
    np.testing.assert_allclose(found[[0, 2]], expected[[0, 2]], atol=1e-5)


def test_all_that_moves_is_accounted_for(tiny_bundle: Bundle) -> None:
    fused = Forms(tiny_bundle, F32).fused(None)
    run(fused, Span(prompt_of(8), [0]))
    before = fused.counters
    run(fused, Span([1], [0], 8))
    after = fused.counters
    config = tiny_bundle.config
    assert after.num_calls - before.num_calls == 2  # the only part, and the head
    row = config.num_kv_heads * config.head_size
    assert after.gathered_bytes - before.gathered_bytes == 2 * 2 * 8 * row * 4
    window = 2 * 2 * 16 * row
    rows = 2 * config.hidden_size + 2 * 2 * row + 17 + config.head_size
    head = config.hidden_size + config.vocab_size
    assert after.copied_bytes - before.copied_bytes == 4 * (window + rows + head)


@pytest.mark.parametrize(
    "changes", [{"num_heads": 4, "num_kv_heads": 2}, {"num_layers": 3}], ids=["heads", "layers"]
)
def test_other_sizes(tmp_path: Path, kernels: None, changes: dict[str, int]) -> None:
    bundle = import_tiny_model(tmp_path, **changes)  # type: ignore[arg-type]
    lane = NpuLane(bundle.config, reference_graphs(bundle, (32,), (8,)), "r", 128, MAX_ROWS)
    expected = many_steps(Forms(bundle, F32).segments(lane))
    assert relative_rms(many_steps(Forms(bundle, F32).fused(None)), expected) < MAX_ROUNDING


@pytest.mark.npu
@pytest.mark.parametrize("soc_model", [60, 88])
@pytest.mark.parametrize("name", ["f32", "int8"])
def test_the_emulator_agrees_with_the_segment_form(
    tiny_bundle: Bundle, emulator: None, soc_model: int, name: str
) -> None:
    kv_format = KV_FORMATS[name]
    graphs = emulated_graphs(tiny_bundle, soc_model, (32,), (8,))
    lane = NpuLane(tiny_bundle.config, graphs, "npu-emulated", 128, MAX_ROWS)
    segments, forms = Forms(tiny_bundle, kv_format), Forms(tiny_bundle, kv_format)
    expected = many_steps(segments.segments(lane))
    found = many_steps(forms.fused(soc_model))
    error = relative_rms(found, expected)
    assert error < max(MAX_FP16, MAX_PAGES[name]), f"relative RMS {error:.2e}"


@pytest.mark.npu
def test_greedy_continuations_are_those_of_the_segments(
    tiny_bundle: Bundle, segments_lane: NpuLane, emulator: None
) -> None:
    """Of prompts whose choices are no near ties."""
    segments = Forms(tiny_bundle, F32).segments(segments_lane)
    fused = Forms(tiny_bundle, F32).fused(88)
    clear = 0
    for seed in range(20):
        expected, margin = continuation(segments, prompt_of(20, seed), [0, 1])
        if margin > CLEAR_MARGIN:
            clear += 1
            assert continuation(fused, prompt_of(20, seed), [0, 1])[0] == expected
        if clear == 2:
            return
    raise AssertionError(f"only {clear} of 20 prompts have clear continuations")


def continuation(
    form: StepForm, prompt: Sequence[int], table: Sequence[int]
) -> tuple[list[int], float]:
    """12 tokens, and the least distance of a chosen logit from the next best one."""
    tokens = list(prompt)
    fresh, margin = tokens, float("inf")
    for _ in range(12):
        span = Span(fresh, table, len(tokens) - len(fresh))
        logits = run(form, span, rows="last")[0]
        second, first = np.sort(logits)[-2:]
        margin = min(margin, float(first - second))
        fresh = [int(logits.argmax())]
        tokens += fresh
    return tokens[len(prompt) :], margin
