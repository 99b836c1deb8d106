"""The NPU's lane in the HTP emulator, with a tiny random model, compiled for both chips.

fp16 arithmetic is not batch-invariant: another bucket may round in another order. So packed and
alone are compared within a bound, and by the token that a greedy sampler would take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from engine.batch import Float32Array
from engine.bundle import Bundle
from engine.embedding import Embedding
from engine.errors import DeviceOverflow
from engine.export.model import load_weights
from engine.kernels.attention_kernel import KernelAttention
from engine.kv_cache import PagedKVCache
from engine.kv_format import F32, INT8, KVFormat
from engine.lane import CpuLane, Lane
from engine.model_runner import ModelRunner, StepLanes
from engine.npu.lane import NpuLane
from tests.batches import Span, make_batch
from tests.emulator import emulated_graphs, reference_graphs, relative_rms

pytestmark = pytest.mark.npu

SOCS = (60, 88)
BUCKETS, HEAD_BUCKETS = (1, 8, 32), (1, 8)
MAX_TOKENS, MAX_ROWS, NUM_BLOCKS = 128, 64, 64

# Relative RMS of logits against the CPU provider with fp32 activations, over all tokens of a
# prompt; measured 6e-4 to 1e-3 for this model on both chips.
MAX_ERROR = 3e-3
# The same of the CPU lane proper, whose activations are int8; measured 8e-3.
MAX_INT8_ERROR = 2e-2
# Logits are of order one. What fp16 changes in them is far below this.
CLEAR_MARGIN = 0.03
# Packed against alone, both in the emulator.
MAX_PACKING_ERROR = 2e-3


@pytest.fixture(scope="module", params=SOCS)
def npu(request: pytest.FixtureRequest, tiny_bundle: Bundle, emulator: None) -> NpuLane:
    graphs = emulated_graphs(tiny_bundle, request.param, BUCKETS, HEAD_BUCKETS)
    return NpuLane(tiny_bundle.config, graphs, "npu-emulated", MAX_TOKENS, MAX_ROWS)


@pytest.fixture(scope="module")
def reference(tiny_bundle: Bundle) -> NpuLane:
    graphs = reference_graphs(tiny_bundle, (32,), (8,))
    return NpuLane(tiny_bundle.config, graphs, "reference", MAX_TOKENS, MAX_ROWS)


@pytest.fixture(scope="module")
def cpu(tiny_bundle: Bundle) -> CpuLane:
    return CpuLane(tiny_bundle.config, tiny_bundle.path, MAX_TOKENS, MAX_ROWS, 1)


class Steps:
    """One model's pages and attention, with any lane for any step."""

    def __init__(self, bundle: Bundle, kv_format: KVFormat = F32) -> None:
        config = bundle.config
        self._num_layers = config.num_layers
        attention = KernelAttention(config, kv_format, config.context_length, MAX_TOKENS, 1)
        embedding = Embedding(bundle.weights_path, load_weights(bundle.path).embed, 1.0)
        self._cache = PagedKVCache(config, kv_format, NUM_BLOCKS)
        self._parts = attention, embedding, self._cache

    def run(self, lane: Lane, *spans: Span, rows: str = "all") -> Float32Array:
        runner = ModelRunner(lane, *self._parts)
        return runner.execute(make_batch(spans, NUM_BLOCKS - 1, rows)).copy()

    def run_on(self, lanes: Sequence[Lane], last: Lane, *spans: Span) -> Float32Array:
        """Segment by segment on these lanes."""
        runner = ModelRunner(lanes[0], *self._parts)
        placed = StepLanes(tuple(lanes), last, last)
        return runner.execute_on(placed, make_batch(spans, NUM_BLOCKS - 1)).copy()

    def continuation(
        self, lanes: Sequence[Lane], prompt: Sequence[int], table: Sequence[int]
    ) -> tuple[list[int], float]:
        """The greedy one: the prompt on the first lane, each new token on the next one.

        With the least distance of a chosen token's logit from the next best one's.
        """
        tokens = list(prompt)
        fresh, margin = tokens, float("inf")
        for lane in lanes:
            span = Span(fresh, table, len(tokens) - len(fresh))
            logits = self.run(lane, span, rows="last")[0]
            second, first = np.sort(logits)[-2:]
            margin = min(margin, float(first - second))
            fresh = [int(logits.argmax())]
            tokens += fresh
        return tokens[len(prompt) :], margin

    def clear_continuations(
        self, lane: Lane, length: int, count: int
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Prompts with their continuations of 12 tokens, none of them decided by a hair."""
        found = 0
        for seed in range(60):
            if found == count:
                return
            prompt = prompt_of(length, seed)
            continuation, margin = self.continuation([lane] * 12, prompt, [0, 1, 2])
            if margin > CLEAR_MARGIN:
                found += 1
                yield prompt, continuation
        raise AssertionError(f"only {found} of 60 prompts have clear continuations")


@pytest.fixture
def steps(tiny_bundle: Bundle) -> Steps:
    return Steps(tiny_bundle)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, 320, length).tolist()
    return tokens


@pytest.mark.parametrize("length", [1, 8, 41])
def test_logits_are_those_of_the_cpu_provider_within_fp16(
    npu: NpuLane, reference: NpuLane, steps: Steps, length: int
) -> None:
    span = Span(prompt_of(length), [0, 1, 2])
    found, expected = steps.run(npu, span), steps.run(reference, span)
    error = relative_rms(found, expected)
    assert error < MAX_ERROR, f"relative RMS {error:.2e}"


def test_greedy_continuations_are_those_of_the_cpu_provider(
    npu: NpuLane, reference: NpuLane, steps: Steps
) -> None:
    for prompt, expected in steps.clear_continuations(reference, 20, 3):
        assert steps.continuation([npu] * 12, prompt, [3, 4])[0] == expected


@pytest.mark.parametrize("kv_format", [F32, INT8], ids=["f32", "int8"])
def test_lanes_can_follow_each_other_at_any_step_of_a_sequence(
    npu: NpuLane, reference: NpuLane, tiny_bundle: Bundle, kv_format: KVFormat
) -> None:
    """Between arithmetics that differ by fp16 only; the CPU lane proper has int8 activations."""
    steps, n, c = Steps(tiny_bundle, kv_format), npu, reference
    for prompt, expected in steps.clear_continuations(c, 30, 2):
        for order in ([n] + [c] * 11, [c] + [n] * 11, [n, c, c, n, n, c, n, c, n, c, c, n]):
            assert steps.continuation(order, prompt, [3, 4, 5])[0] == expected


def test_the_cpu_lane_proper_takes_over_and_gives_back(
    npu: NpuLane, cpu: CpuLane, reference: NpuLane, steps: Steps
) -> None:
    """Prompt, decodes and prompt again on either lane: every logit within the int8 bound."""
    prompt, table = prompt_of(40), [0, 1, 2]
    expected = steps.run(reference, Span(prompt, table))
    lanes: list[list[Lane]] = [[cpu, npu, cpu], [npu, cpu, npu]]
    for first, second, third in lanes:
        found = [steps.run(first, Span(prompt[:17], table))]
        found += [steps.run(second, Span([prompt[i]], table, i)) for i in range(17, 23)]
        found += [steps.run(third, Span(prompt[23:], table, 23))]
        error = relative_rms(np.concatenate(found), expected)
        assert error < MAX_INT8_ERROR, f"relative RMS {error:.2e}"


def test_lanes_can_follow_each_other_within_a_step(
    npu: NpuLane, cpu: CpuLane, reference: NpuLane, steps: Steps
) -> None:
    span = Span(prompt_of(20), [0, 1])
    expected = steps.run(reference, span)
    placements: list[tuple[list[Lane], Lane]] = [([npu, cpu], npu), ([cpu, npu], cpu)]
    for lanes, last in placements:
        assert relative_rms(steps.run_on(lanes, last, span), expected) < MAX_INT8_ERROR


def test_packed_is_alone_within_the_bound_and_to_the_token(npu: NpuLane, steps: Steps) -> None:
    prompts = [prompt_of(length, length) for length in (5, 1, 17, 12)]
    spans = [Span(prompt, [2 * i, 2 * i + 1]) for i, prompt in enumerate(prompts)]
    packed = steps.run(npu, *spans)
    alone = np.concatenate([steps.run(npu, span) for span in spans])
    error = relative_rms(packed, alone)
    assert error < MAX_PACKING_ERROR, f"relative RMS {error:.2e}"
    assert np.array_equal(packed.argmax(axis=1), alone.argmax(axis=1))


def test_packed_decodes_are_alone_within_the_bound_and_to_the_token(
    npu: NpuLane, steps: Steps
) -> None:
    prompts = [prompt_of(length, length) for length in (5, 20, 17)]
    tables = [[2 * i, 2 * i + 1] for i in range(3)]
    for prompt, table in zip(prompts, tables, strict=True):
        steps.run(npu, Span(prompt, table))
    decodes = [Span([7], table, len(p)) for p, table in zip(prompts, tables, strict=True)]
    packed = steps.run(npu, *decodes)
    alone = np.concatenate([steps.run(npu, decode) for decode in decodes])
    assert relative_rms(packed, alone) < MAX_PACKING_ERROR
    assert np.array_equal(packed.argmax(axis=1), alone.argmax(axis=1))


def test_numbers_beyond_fp16_are_an_overflow(npu: NpuLane) -> None:
    buffers = npu.begin(4)
    buffers.hidden[:] = 1
    npu.run(0)
    buffers.attention[:] = 1
    buffers.attention[2] = 1e6
    with pytest.raises(DeviceOverflow, match="row 2 that goes into segment 1"):
        npu.run(1)


def test_a_sequence_that_is_not_finite_harms_no_other(npu: NpuLane) -> None:
    """The HTP has no NaN: it would go on with finite garbage."""
    buffers = npu.begin(4)
    buffers.hidden[:] = 1
    npu.run(0)
    buffers.attention[:] = 1
    npu.run(1)
    clean = buffers.qkv.copy()
    npu.begin(4)
    buffers.attention[2, 5] = np.nan
    npu.run(1)
    assert np.isnan(buffers.qkv[2]).all() and np.isnan(npu.residual(2)[2]).all()
    assert np.array_equal(buffers.qkv[[0, 1, 3]], clean[[0, 1, 3]])


def test_all_that_moves_is_accounted_for(npu: NpuLane, steps: Steps) -> None:
    before = npu.counters
    steps.run(npu, Span(prompt_of(9), [0]), rows="last")
    after = npu.counters
    assert after.num_calls - before.num_calls == 4  # two segments, the last, the head
    assert after.num_padding_rows - before.num_padding_rows == 2 * 23
    assert after.copied_bytes > before.copied_bytes
    assert after.shared_bytes == 0
