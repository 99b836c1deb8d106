"""Loading an engine: what it is told, what it finds, and every reason to refuse."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.bundle import Bundle
from engine.embedding import Embedding
from engine.errors import BundleError, DeviceUnavailable, DoesNotFit
from engine.export.model import INDEX_FILE, segment_file
from engine.export.weights_file import read_matrix
from engine.importers.gguf import read_gguf
from engine.kernels.attention_kernel import run_part
from engine.kernels.sampling_kernel import log_sum_exp, penalize, sample_row
from engine.loader import EngineConfig, LoadedEngine, load_engine
from engine.sampler import SampleRow
from engine.sampling_params import SamplingParams
from tests.batches import Span, int32, make_batch
from tests.loaded_model import load_model

# 2 layers of 1 KV head of 32, twice (keys and values): data and scales.
BLOCK_BYTES = {"f32": 16 * 4 * (128 + 4), "int8": 16 * 4 * (32 + 4), "int4": 16 * 4 * (16 + 4)}


def config(bundle: Bundle, **changes: Any) -> EngineConfig:
    plain = EngineConfig(
        bundle=bundle.path,
        device="cpu",
        num_threads=1,
        kv_memory_bytes=100 * BLOCK_BYTES["int8"],
        kv_format="int8",
        max_model_len=None,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    return replace(plain, **changes)


def load(bundle: Bundle, **changes: Any) -> LoadedEngine:
    return load_engine(config(bundle, **changes), lambda phase: None)


def test_a_loaded_engine_says_what_it_is(tiny_bundle: Bundle) -> None:
    phases: list[str] = []
    info = load_engine(config(tiny_bundle), phases.append).info
    assert (info.num_blocks, info.block_size, info.kv_bytes) == (100, 16, 100 * 2304)
    assert (info.max_model_len, info.vocab_size, info.num_threads) == (512, 320, 1)
    assert (info.kv_format, info.weight_format) == ("int8", "int4")
    assert (info.device, info.device_reason) == ("cpu", "asked for with --device cpu")
    assert info.batch_invariant
    assert phases[0] == "loading the weights" and len(phases) == 2


@pytest.mark.parametrize("kv_format", BLOCK_BYTES)
def test_the_budget_in_bytes_gives_the_blocks_of_each_format(
    tiny_bundle: Bundle, kv_format: str
) -> None:
    budget = 40 * BLOCK_BYTES[kv_format] + 77
    info = load(tiny_bundle, kv_format=kv_format, kv_memory_bytes=budget).info
    assert info.num_blocks == 40 and info.kv_bytes == budget - 77


def test_what_no_sequence_could_use_is_not_taken(tiny_bundle: Bundle) -> None:
    info = load(tiny_bundle, kv_memory_bytes=10**12, max_num_seqs=2, max_model_len=160).info
    assert info.num_blocks == 20 and info.max_model_len == 160


def test_the_context_is_what_the_blocks_hold_if_nobody_asked_for_more(tiny_bundle: Bundle) -> None:
    assert load(tiny_bundle, kv_memory_bytes=3 * BLOCK_BYTES["int8"]).info.max_model_len == 48


def test_a_memory_below_one_block_is_refused_with_the_numbers(tiny_bundle: Bundle) -> None:
    with pytest.raises(DoesNotFit, match=r"2,303 bytes is less than one block of 2,304 bytes"):
        load(tiny_bundle, kv_memory_bytes=2303)


def test_a_context_beyond_the_memory_is_refused_with_the_numbers(tiny_bundle: Bundle) -> None:
    message = r"--max-model-len 200 does not fit: 6,912 bytes of KV memory hold 48 tokens in int8"
    with pytest.raises(DoesNotFit, match=message):
        load(tiny_bundle, max_model_len=200, kv_memory_bytes=3 * BLOCK_BYTES["int8"])


def test_a_context_beyond_the_model_is_refused_with_the_numbers(tiny_bundle: Bundle) -> None:
    with pytest.raises(DoesNotFit, match=r"--max-model-len 513 is more than the 512 tokens"):
        load(tiny_bundle, max_model_len=513)


def test_a_context_below_one_block_is_refused_with_the_numbers(tiny_bundle: Bundle) -> None:
    with pytest.raises(DoesNotFit, match=r"--max-model-len 15 is less than one block of 16 tokens"):
        load(tiny_bundle, max_model_len=15)


def test_an_unknown_format_is_refused_with_the_known_ones(tiny_bundle: Bundle) -> None:
    with pytest.raises(DoesNotFit, match=r"unknown KV format 'fp8': use one of .*f32.*int8.*int4"):
        load(tiny_bundle, kv_format="fp8")


def test_an_npu_that_is_not_there_is_refused(tiny_bundle: Bundle) -> None:
    with pytest.raises(DeviceUnavailable, match=r"^--device npu: .*use --device auto or cpu"):
        load(tiny_bundle, device="npu")


def test_auto_says_what_it_chose_and_why(tiny_bundle: Bundle) -> None:
    info = load(tiny_bundle, device="auto").info
    assert info.device == "cpu" and info.device_reason.startswith("chosen automatically: ")


def copy_of(bundle: Bundle, folder: Path) -> Bundle:
    return Bundle.open(Path(shutil.copytree(bundle.path, folder / "copy")))


def test_a_folder_that_is_no_bundle_is_refused(tiny_bundle: Bundle, tmp_path: Path) -> None:
    elsewhere = replace(config(tiny_bundle), bundle=tmp_path)
    with pytest.raises(BundleError, match=r"no readable model.json; run `hexlm pull"):
        load_engine(elsewhere, lambda phase: None)


@pytest.mark.parametrize(
    ("old", "new"),
    [('"embed"', '"emped"'), ("{", "["), ('"offset"', '"ofsett"'), ('"bits": 8', '"bots": 8')],
)
def test_a_damaged_index_is_refused_with_the_way_to_mend_it(
    tiny_bundle: Bundle, tmp_path: Path, old: str, new: str
) -> None:
    bundle = copy_of(tiny_bundle, tmp_path)
    index = bundle.path / INDEX_FILE
    index.write_text(index.read_text("utf-8").replace(old, new, 1), "utf-8")
    with pytest.raises(BundleError, match=r"weights.json is damaged .*hexlm pull \S+ --force"):
        load(bundle)


def test_an_index_that_points_behind_the_file_is_refused(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    bundle = copy_of(tiny_bundle, tmp_path)
    index = bundle.path / INDEX_FILE
    content = json.loads(index.read_text("utf-8"))
    content["embed"]["data"]["offset"] = bundle.weights_path.stat().st_size - 64
    index.write_text(json.dumps(content), "utf-8")
    with pytest.raises(BundleError, match=r"weights.bin cannot be mapped"):
        load(bundle)


def test_a_damaged_graph_is_refused_by_name(tiny_bundle: Bundle, tmp_path: Path) -> None:
    bundle = copy_of(tiny_bundle, tmp_path)
    graph = bundle.path / segment_file(2)
    graph.write_bytes(b"\xff" * graph.stat().st_size)
    with pytest.raises(BundleError, match=r"cpu_segment_002\.onnx cannot be loaded"):
        load(bundle, kernels="onnxruntime")


def test_a_bundle_with_a_missing_file_is_refused(tiny_bundle: Bundle, tmp_path: Path) -> None:
    bundle = copy_of(tiny_bundle, tmp_path)
    (bundle.path / segment_file(1)).unlink()
    with pytest.raises(BundleError, match=r"cpu_segment_001\.onnx is missing"):
        load(bundle)


@pytest.mark.parametrize("kv_format", BLOCK_BYTES)
def test_a_loaded_engine_computes_what_its_parts_do(tiny_bundle: Bundle, kv_format: str) -> None:
    tokens, table = list(range(40)), [2, 0, 1]
    runner = load(tiny_bundle, kv_format=kv_format).runner
    found = runner.execute(make_batch([Span(tokens, table)]))
    model = load_model(tiny_bundle, kv_format, kernels="auto")
    assert np.array_equal(found, model.logits_of(tokens, table))


def test_nothing_is_compiled_after_the_start(tiny_bundle: Bundle) -> None:
    """Whatever a request asks for: a compiler in the middle of a step takes seconds."""
    engine = load(tiny_bundle, num_threads=2, max_num_batched_tokens=400)
    dispatchers = (run_part, penalize, sample_row, log_sum_exp)
    before = [len(each.signatures) for each in dispatchers]
    prefill = make_batch([Span([5] * 300, list(range(20))), Span([1], [30])], rows="last")
    engine.runner.execute(prefill)
    decode = make_batch([Span([1], list(range(20)), 300), Span([1], [30], 1)])
    logits = engine.runner.execute(decode)
    asked = SamplingParams(
        max_tokens=1, temperature=0.7, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.5, frequency_penalty=0.5, logit_bias=((3, 1.0),), seed=2**63 - 1,
        stop_token_ids=(2,), min_tokens=1, logprobs=20,
    )  # fmt: skip
    engine.sampler.sample(logits, [SampleRow(1, 2, asked, [1, 2], 1)])
    engine.sampler.score(logits, 0, 5, 3)
    assert [len(each.signatures) for each in dispatchers] == before


def test_the_embedding_is_the_checkpoints(tiny_bundle: Bundle) -> None:
    matrix = read_matrix(tiny_bundle.path / INDEX_FILE, "embed")
    out = np.zeros((4, 64), np.float32)
    Embedding(tiny_bundle.weights_path, matrix, 1.0).lookup(int32([7, 0, 319, 7]), out)
    exact = read_gguf(Path(tiny_bundle.source.path)).tensor("embed").dequantize()
    assert np.array_equal(out, exact[[7, 0, 319, 7]])
