"""Hugging Face folders: every tensor, number and token arrives; whatever does not fit is named."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import ImportFailed
from engine.export.exporter import import_checkpoint, open_checkpoint
from engine.export.packing import pack_auto
from engine.importers.hugging_face import HfCheckpoint, read_hugging_face
from engine.importers.tensor_store import open_tensors
from engine.importers.weight_source import NamedSlice, PlainSource
from tests.engine.hf_folders import (
    CONFIG,
    HIDDEN,
    INNER,
    LAYERS,
    VOCAB,
    linear_names,
    random_llama,
    to_bfloat16,
    write_folder,
    write_safetensors,
    write_shards,
)
from tests.engine.quantized_files import Arrays, Layer, awq_gemm, compressed, gptq, random_layer
from tests.loaded_model import load_model
from tests.numpy_forward import numpy_forward

TOKENS = [5, 70, 300, 12, 65, 66, 67, 1, 200, 319, 33]


def ignore(done: int, total: int) -> None:
    pass


def read(folder: Path, tensors: Arrays | None = None, **config: Any) -> HfCheckpoint:
    return read_hugging_face(write_folder(folder, tensors, config))


def refusal(folder: Path, tensors: Arrays | None = None, **config: Any) -> str:
    with pytest.raises(ImportFailed) as caught:
        read(folder, tensors, **config)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


def engine_logits(source: Path, weight_format: str) -> NDArray[np.float32]:
    target = source.parent.parent / f"bundle-{weight_format}"
    bundle = import_checkpoint(source, target, "tiny", ignore, weight_format=weight_format)
    return load_model(bundle, kv_format="f32").logits_of(TOKENS, [3, 1], [4, 1, 6])


def relative_error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


def test_a_float_model_gives_the_logits_of_its_weights(kernels: None, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "m")
    expected = numpy_forward(read_hugging_face(source), TOKENS)
    assert np.abs(engine_logits(source, "f32") - expected).max() < 1e-4
    assert relative_error(engine_logits(source, "auto"), expected) < 0.04


def quantized_llama(packer: Any) -> tuple[Arrays, dict[str, Layer]]:
    """Every layer matrix packed by `packer(base, layer)`; embedding and head left alone."""
    tensors: dict[str, NDArray[Any]] = dict(random_llama())
    layers = {}
    for index in range(LAYERS):
        for seed, (base, (rows, cols)) in enumerate(linear_names(index).items()):
            layers[base] = random_layer(rows, cols, 32, seed=seed + 100 * index)
            del tensors[f"{base}.weight"]
            tensors |= packer(base, layers[base])
    return tensors, layers


def gptq_with_bias(base: str, layer: Layer) -> Arrays:
    """As GPTQ tools write it, with zeros for a bias that the layer does not have."""
    return gptq(base, layer) | {f"{base}.bias": np.zeros(len(layer.values), np.float16)}


def act_order(base: str, layer: Layer) -> Arrays:
    order = np.random.default_rng(7).permutation(layer.group_of)
    object.__setattr__(layer, "group_of", order)
    return gptq(base, layer)


def ct(base: str, layer: Layer) -> Arrays:
    return compressed(base, layer, is_symmetric=False)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
SCHEME = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": SCHEME, "targets": ["Linear"]}},
    "ignore": ["lm_head"],
}


@pytest.mark.parametrize(
    ("packer", "section", "bits"),
    [(awq_gemm, AWQ, 4), (gptq_with_bias, GPTQ, 4), (act_order, GPTQ, 8), (ct, COMPRESSED, 4)],
)
def test_quantized_models_run_and_give_the_logits_of_the_published_formula(
    kernels: None, tmp_path: Path, packer: Any, section: Any, bits: int
) -> None:
    tensors, layers = quantized_llama(packer)
    source = write_folder(tmp_path / "m", tensors, {"quantization_config": section})
    checkpoint = read_hugging_face(source)
    base = "model.layers.1.self_attn.v_proj"
    weights = layers[base].weights()
    assert np.array_equal(checkpoint.tensor("layers.1.v").dequantize(), weights)
    assert pack_auto("v", [checkpoint.tensor("layers.1.v")]).bits == bits
    assert checkpoint.tensor("lm_head").quant_type == "F32"
    expected = numpy_forward(checkpoint, TOKENS)
    assert np.abs(engine_logits(source, "f32") - expected).max() < 1e-4
    assert relative_error(engine_logits(source, "auto"), expected) < 0.04


def test_the_summary_says_how_the_weights_are_quantized(tmp_path: Path) -> None:
    tensors, _ = quantized_llama(awq_gemm)
    checkpoint = read(tmp_path / "m", tensors, quantization_config=AWQ)
    assert checkpoint.summary.quantization == "AWQ 4-bit, groups of 32"
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model")
    summary = read(tmp_path / "n").summary
    assert (summary.quantization, summary.licence, summary.title) == ("F32", "apache-2.0", "n")
    assert summary.num_parameters == sum(array.size for array in random_llama().values())


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
def test_every_float_storage_is_read(tmp_path: Path, storage: str) -> None:
    original = random_llama()
    rounded: dict[str, NDArray[Any]] = {
        name: to_bfloat16(array) if storage == "bfloat16" else array.astype(storage)
        for name, array in original.items()
    }
    checkpoint = read(tmp_path / "m", rounded)
    name = "model.layers.0.mlp.down_proj.weight"
    stored = rounded[name]
    expected = (
        (stored.astype(np.uint32) << 16).view(np.float32)
        if storage == "bfloat16"
        else stored.astype(np.float32)
    )
    tensor = checkpoint.tensor("layers.0.down")
    assert np.array_equal(tensor.dequantize(), expected)
    assert np.array_equal(tensor.rows(5, 9), expected[5:9])
    assert tensor.quant_type == {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[storage]


def test_shards_hold_the_same_model(tmp_path: Path) -> None:
    whole = read(tmp_path / "a")
    folder = tmp_path / "b"
    write_folder(folder)
    (folder / "model.safetensors").unlink()
    index = write_shards(folder, random_llama())
    sharded = open_checkpoint(index)
    assert isinstance(sharded, HfCheckpoint) and sharded.config == whole.config
    for name in ("embed", "lm_head", "layers.1.gate", "final_norm"):
        expected = whole.tensor(name).dequantize()
        assert np.array_equal(sharded.tensor(name).dequantize(), expected)
    assert sharded.summary.num_file_bytes > sharded.summary.num_parameters * 4


def test_the_digest_covers_every_file_of_the_model(tmp_path: Path) -> None:
    first = read(tmp_path / "m").digest
    assert read(tmp_path / "m").digest == first
    (tmp_path / "m" / "generation_config.json").write_text("{}")
    assert read_hugging_face(tmp_path / "m" / "model.safetensors").digest != first


def test_fused_projections_are_taken_apart(tmp_path: Path) -> None:
    tensors: dict[str, NDArray[Any]] = dict(random_llama())
    parts = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        qkv = [tensors.pop(f"{prefix}self_attn.{name}_proj.weight") for name in "qkv"]
        gate_up = [tensors.pop(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up")]
        tensors[f"{prefix}self_attn.qkv_proj.weight"] = np.concatenate(qkv)
        tensors[f"{prefix}mlp.gate_up_proj.weight"] = np.concatenate(gate_up)
        parts[layer] = dict(zip(("q", "k", "v", "gate", "up"), [*qkv, *gate_up], strict=True))
    checkpoint = read(tmp_path / "m", tensors, model_type="phi3", pad_token_id=0)
    for name, expected in parts[1].items():
        assert np.array_equal(checkpoint.tensor(f"layers.1.{name}").dequantize(), expected)


def test_norms_around_zero_get_their_one(tmp_path: Path) -> None:
    tensors = random_llama(is_tied=True)
    head = HIDDEN // 4
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.zeros(HIDDEN, np.float32)
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = np.full(head, 0.5, np.float32)
    checkpoint = read(
        tmp_path / "m", tensors, model_type="gemma3_text", head_dim=head, tie_word_embeddings=True,
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=head, sliding_window=16,
    )  # fmt: skip
    assert (checkpoint.tensor("layers.1.q_norm").dequantize() == 1.5).all()
    assert (checkpoint.tensor("layers.0.post_mlp_norm").dequantize() == 1).all()
    expected = tensors["model.layers.0.self_attn.q_proj.weight"]
    assert np.array_equal(checkpoint.tensor("layers.0.q").dequantize(), expected)


def test_end_tokens_are_the_union_of_both_files(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    config = read(folder, eos_token_id=11).config
    assert config.eos_token_ids == (2, 7, 9, 11, 0)
    assert (config.bos_token_id, config.add_bos) == (1, True)


def test_weights_are_read_a_few_rows_at_a_time(tmp_path: Path) -> None:
    """Packing 16 M weights of two bytes: the floats would take 64 MB, and twice that on the way."""
    rows, cols = 16_384, 1024
    path = write_safetensors(tmp_path / "a.safetensors", {"w": np.zeros((rows, cols), np.uint16)})
    tensor = NamedSlice("w", (rows, cols), PlainSource(open_tensors(path).get("w")))
    tracemalloc.start()
    packed = pack_auto("w", [tensor])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert packed.data.nbytes == rows * cols
    assert peak < 3.5 * rows * cols + (80 << 20)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.norm.weight"), "tensor 'model.norm.weight' is missing"),
        (lambda t: t.pop("model.embed_tokens.weight"), "'model.embed_tokens.weight' is missing"),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(8, np.float32)}),
            "'model.norm.weight' has the shape [8], config.json asks for [64]",
        ),
        (
            lambda t: t.update({"model.layers.2.x.weight": np.zeros(8, np.float32)}),
            "tensors without a role in a llama: model.layers.2.x.weight",
        ),
        (
            lambda t: t.update({"lm_head.weight": np.zeros((VOCAB, HIDDEN), np.int8)}),
            "'lm_head.weight' is stored as I8; supported: ",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.bias": np.zeros(INNER, np.float32)}),
            "tensors without a role in a llama: model.layers.0.mlp.up_proj.bias",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: Any, said: str) -> None:
    tensors = random_llama()
    change(tensors)
    assert said in refusal(tmp_path / "m", tensors)


def test_8_bit_floats_are_refused_by_name(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "m", dict(random_llama()))
    data = source.read_bytes()
    name = b'"lm_head.weight": {"dtype": "F32", "shape": [320, 64]'
    assert name in data
    changed = name.replace(b'"F32", "shape": [320, 64]', b'"F8_E4M3", "shape": [1280,64]')
    length = int.from_bytes(data[:8], "little") + len(changed) - len(name)
    source.write_bytes(length.to_bytes(8, "little") + data[8:].replace(name, changed))
    with pytest.raises(ImportFailed, match=r"stored as F8_E4M3 \(8-bit floats\), which is not"):
        read_hugging_face(source)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mamba"}, "models of type 'mamba' cannot be imported; supported: "),
        ({"model_type": None}, "models of type None cannot be imported"),
        ({"vocab_size": 100}, "tokenizer has 320 tokens with ids up to 319, the model has 100"),
        ({"eos_token_id": "</s>"}, "eos_token_id is neither a token id nor a list of them"),
        ({"eos_token_id": 9999}, "the special token 9999 is not one of 320"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized by 'fp8'"),
        ({"hidden_size": 0}, "'hidden_size' is 0"),
    ],
)
def test_settings_that_do_not_fit_are_named(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    assert said in refusal(tmp_path / "m", None, **config)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "m")
    (source.parent / "config.json").unlink()
    with pytest.raises(ImportFailed, match=r"config\.json does not exist"):
        open_checkpoint(source)


def test_the_text_part_of_a_model_with_several_is_taken(tmp_path: Path) -> None:
    text = {key: value for key, value in CONFIG.items() if key != "architectures"}
    folder = tmp_path / "m"
    source = write_folder(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "odd", "text_config": text}))
    assert read_hugging_face(source).config.hidden_size == HIDDEN
