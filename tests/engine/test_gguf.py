"""A GGUF as a checkpoint: numbers, names, row order, and what is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from engine.architectures.config import ModelConfig
from engine.architectures.rope import plain_rope, same_layers
from engine.errors import ImportFailed
from engine.importers.gguf import (
    SUPPORTED_QUANT_TYPES,
    GgufCheckpoint,
    GgufTensor,
    half_split_order,
    read_gguf,
)
from engine.importers.gguf_reader import open_gguf
from tests.engine.gguf_files import (
    CHAT_TEMPLATE,
    GgufParts,
    RawTensor,
    Value,
    encode_tensor,
    tiny_llama_parts,
    write_gguf,
    write_tiny_llama_gguf,
)


def refusal(tmp_path: Path, parts: GgufParts) -> str:
    with pytest.raises(ImportFailed) as caught:
        read_gguf(write_gguf(tmp_path / "a.gguf", parts))
    return str(caught.value)


def tiny(tmp_path: Path, quant: str = "Q4_1") -> GgufCheckpoint:
    return read_gguf(write_tiny_llama_gguf(tmp_path / "a.gguf", quant=quant))


def file_rows(parts: GgufParts, name: str) -> NDArray[np.float32]:
    """The tensor as it stands in the file, dequantized by the reference code."""
    tensor = parts.tensors[name]
    raw = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[0], -1)
    return dequantize(raw, GGMLQuantizationType[tensor.quant]).reshape(tensor.shape)


def to_interleaved(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """What converters from transformers to GGUF do to q and k."""
    split = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, rows.shape[1])
    return split.swapaxes(1, 2).reshape(rows.shape)


def test_the_config_has_the_numbers_of_the_file(tmp_path: Path) -> None:
    assert tiny(tmp_path).config == ModelConfig(
        architecture="llama",
        hidden_size=64,
        intermediate_size=128,
        num_heads=3,
        num_kv_heads=1,
        head_size=32,
        vocab_size=320,
        context_length=512,
        rms_norm_eps=float(np.float32(1e-5)),
        layers=same_layers(2),
        ropes=(plain_rope(32, 10_000.0),),
        attention_scale=32**-0.5,
        tied_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2, 0),
        add_bos=False,
    )


def test_digest_template_and_summary_are_those_of_the_file(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path)
    data = (tmp_path / "a.gguf").read_bytes()
    assert checkpoint.digest == hashlib.sha256(data).hexdigest()
    assert checkpoint.chat_template == CHAT_TEMPLATE
    summary = checkpoint.summary
    assert (summary.quantization, summary.pre_tokenizer) == ("Q4_1", "smollm")
    assert (summary.file_name, summary.num_file_bytes) == ("a.gguf", len(data))
    assert summary.num_parameters == 320 * 64 + 64 + 2 * (2 * 64 + (96 + 32 + 32 + 96 + 384) * 64)


def test_interleaved_rows_come_out_half_split(tmp_path: Path) -> None:
    half_split = np.random.default_rng(1).standard_normal((96, 64), dtype=np.float32)
    parts = tiny_llama_parts(quant="F32")
    interleaved = to_interleaved(half_split, num_heads=3)
    parts.tensors["blk.1.attn_q.weight"] = encode_tensor(interleaved, "F32")
    checkpoint = read_gguf(write_gguf(tmp_path / "a.gguf", parts))
    np.testing.assert_array_equal(checkpoint.tensor("layers.1.q").dequantize(), half_split)


def test_half_split_order_of_one_head_of_six() -> None:
    assert half_split_order(6, 6).tolist() == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize("quant", ["Q4_1", "Q8_0", "F16", "F32"])
def test_moving_rows_is_exact_for_every_storage(tmp_path: Path, quant: str) -> None:
    parts = tiny_llama_parts(quant=quant)
    tensor = read_gguf(write_gguf(tmp_path / "a.gguf", parts)).tensor("layers.0.k")
    expected = file_rows(parts, "blk.0.attn_k.weight")[half_split_order(32, 32)]
    assert tensor.quant_type == quant
    np.testing.assert_array_equal(tensor.dequantize(), expected)
    raw_rows = dequantize(np.array(tensor.raw()), GGMLQuantizationType[quant])
    np.testing.assert_array_equal(raw_rows, expected)


def test_other_tensors_keep_their_rows_and_are_views_of_the_file(tmp_path: Path) -> None:
    parts = tiny_llama_parts()
    checkpoint = read_gguf(write_gguf(tmp_path / "a.gguf", parts))
    tensor = checkpoint.tensor("layers.0.down")
    assert tensor.raw().tobytes() == parts.tensors["blk.0.ffn_down.weight"].data
    assert not tensor.raw().flags.owndata
    np.testing.assert_array_equal(tensor.dequantize(), file_rows(parts, "blk.0.ffn_down.weight"))


def test_vectors_are_one_row(tmp_path: Path) -> None:
    norm = tiny(tmp_path).tensor("final_norm")
    assert norm.raw().shape == (1, 256)
    assert norm.dequantize().shape == norm.shape == (64,)


def test_a_file_with_an_output_matrix_is_not_tied(tmp_path: Path) -> None:
    untied = read_gguf(write_tiny_llama_gguf(tmp_path / "a.gguf", tied_embeddings=False))
    assert not untied.config.tied_embeddings
    assert "lm_head" in untied
    assert untied.tensor("lm_head").shape == (320, 64)
    assert "lm_head" not in tiny(tmp_path)


def test_an_unknown_tensor_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ImportFailed, match="has no tensor 'layers.2.q'"):
        tiny(tmp_path).tensor("layers.2.q")


@pytest.mark.parametrize("name", sorted(SUPPORTED_QUANT_TYPES))
def test_every_storage_is_what_gguf_makes_of_it(tmp_path: Path, name: str) -> None:
    """Random bytes: every code of every block, and scales of any size."""
    rows, cols = 5, 512
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    data = np.random.default_rng(0).integers(
        0, 256, (rows, cols // block_size * block_bytes), np.uint8
    )
    parts = GgufParts({}, {"w": RawTensor((rows, cols), name, data.tobytes())})
    file = open_gguf(write_gguf(tmp_path / "a.gguf", parts))
    tensor = GgufTensor("w", file.tensors["w"], file, (rows, cols))
    with np.errstate(all="ignore"):
        found = tensor.dequantize()
        if name == "F64":
            expected = data.view("<f8").astype(np.float32)
        else:
            expected = dequantize(data, GGMLQuantizationType[name])
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(tensor.rows(1, 4), expected[1:4])
        if (blocks := tensor.blocks()) is not None:
            np.testing.assert_array_equal(blocks.dequantize(), expected)


def test_all_storages_that_gguf_knows_are_supported() -> None:
    """What is left are ggml's types for activations and integers, and one that gguf cannot read."""
    others = {kind.name for kind in GGMLQuantizationType} - SUPPORTED_QUANT_TYPES
    assert others == {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "Q1_0"}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("general.architecture", "mamba", "unsupported architecture 'mamba'; supported: llama, "),
        ("llama.rope.scaling.type", "longrope", "rope.scaling.type = 'longrope' is not supported"),
        ("llama.rope.scaling.type", "yarn", "'llama.rope.scaling.original_context_length' is mis"),
        ("llama.rope.scaling.attn_factor", 1.2, "rope.scaling.attn_factor = 1.2000000476837158 is"),
        ("llama.expert_count", 8, "llama.expert_count = 8 is not supported"),
        ("llama.rope.dimension_count", 16, "rope.dimension_count = 16 with heads of 32"),
        ("llama.attention.value_length", 64, "value_length = 64 with heads of 32"),
        ("llama.attention.head_count_kv", 2, "3 heads and 2 KV heads of 32 do not fit"),
        ("llama.attention.head_count", 0, "'llama.attention.head_count' is 0, expected"),
        ("llama.block_count", 2**31, "'llama.block_count' is 2147483648, expected"),
        ("llama.block_count", "two", "'llama.block_count' is 'two', expected an integer"),
        ("llama.rope.freq_base", float("nan"), "is nan, expected a finite number above 0"),
        ("llama.attention.layer_norm_rms_epsilon", 0.0, "expected a finite number above 0"),
        ("split.count", 3, "is one of 3 parts of a split GGUF, but not named like one"),
        ("tokenizer.chat_template", 5, "'tokenizer.chat_template' is 5, expected a string"),
    ],
)
def test_settings_that_we_do_not_compute_are_refused(
    tmp_path: Path, key: str, value: Value, said: str
) -> None:
    parts = tiny_llama_parts()
    parts.metadata[key] = value
    assert said in refusal(tmp_path, parts)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "none"),
        ("llama.rope.scaling.factor", 1.0),
        ("llama.expert_count", 0),
        ("split.count", 1),
        ("llama.attention.head_count_kv", [1, 1]),
    ],
)
def test_settings_that_change_nothing_are_accepted(tmp_path: Path, key: str, value: Value) -> None:
    parts = tiny_llama_parts()
    parts.metadata[key] = value
    assert read_gguf(write_gguf(tmp_path / "a.gguf", parts)).config.num_layers == 2


@pytest.mark.parametrize("key", ["llama.block_count", "llama.context_length"])
def test_missing_numbers_are_named(tmp_path: Path, key: str) -> None:
    parts = tiny_llama_parts()
    del parts.metadata[key]
    assert f"metadata key {key!r} is missing" in refusal(tmp_path, parts)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    parts = tiny_llama_parts()
    del parts.tensors["blk.1.ffn_up.weight"]
    assert "tensor 'blk.1.ffn_up.weight' is missing" in refusal(tmp_path, parts)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rope_freqs.weight", "tensor 'rope_freqs.weight' must hold 16 numbers above 0"),
        ("blk.0.attn_q.bias", "'blk.0.attn_q.bias' has the shape [32], expected [96]"),
        ("blk.1.attn_q.bias", "tensors without a role in this architecture: blk.1.attn_q.bias"),
        ("blk.2.attn_q.weight", "tensors without a role in this architecture: blk.2.attn_q"),
    ],
)
def test_tensors_without_a_role_are_refused(tmp_path: Path, name: str, said: str) -> None:
    parts = tiny_llama_parts()
    parts.tensors[name] = encode_tensor(np.ones(32, dtype=np.float32), "F32")
    assert said in refusal(tmp_path, parts)


def test_a_wrong_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    parts = tiny_llama_parts()
    rows = np.zeros((64, 64), dtype=np.float32)
    parts.tensors["blk.0.attn_v.weight"] = encode_tensor(rows, "F32")
    said = "'blk.0.attn_v.weight' has the shape [64, 64], expected [32, 64]"
    assert said in refusal(tmp_path, parts)


def test_an_unsupported_storage_is_refused_by_name(tmp_path: Path) -> None:
    parts = tiny_llama_parts()
    block = RawTensor((32, 64), "Q8_1", bytes(32 * 2 * 40))
    parts.tensors["blk.0.attn_v.weight"] = block
    assert "'blk.0.attn_v.weight' has the unsupported type Q8_1" in refusal(tmp_path, parts)
