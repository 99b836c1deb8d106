"""BERT-family checkpoints: import, refusals, and the bundle that comes out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from engine.bundle import ENCODER_FILE, Bundle
from engine.errors import BundleError, ImportFailed
from engine.export.exporter import import_checkpoint
from engine.importers.bert import read_bert
from engine.importers.bert_tokenizer import read_tokenizer
from engine.manifest import ModelKind, decode_manifest, encode_manifest
from tests.bert_folder import (
    CLS,
    CONFIG,
    SEP,
    VOCABULARY,
    cross_encoder_tensors,
    random_tensors,
    safetensors_bytes,
    write_bert,
    write_json,
    write_modules,
)
from tests.engine.gguf_files import write_tiny_llama_gguf


def ignore(done: int, total: int) -> None:
    pass


def refusal(path: Path) -> str:
    with pytest.raises(ImportFailed) as caught:
        read_bert(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def without(name: str) -> dict[str, Any]:
    tensors = random_tensors()
    del tensors[name]
    return tensors


def test_the_numbers_are_read(tmp_path: Path) -> None:
    checkpoint = read_bert(write_bert(tmp_path / "mini", max_tokens=20))
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.head_size) == (
        2, 24, 3, 8,
    )  # fmt: skip
    assert (config.context_length, config.pooling, config.activation) == (20, "mean", "gelu")
    assert checkpoint.summary.title == "mini"
    assert checkpoint.tensor("embed").shape == (len(VOCABULARY), 24)
    assert checkpoint.tensor("position_embed").shape == (20, 24)


def test_a_plain_encoder_pools_by_the_mean_and_takes_all_positions(tmp_path: Path) -> None:
    config = read_bert(write_bert(tmp_path, pooling=None)).config
    assert (config.pooling, config.context_length) == ("mean", 32)


def test_the_first_token_can_be_the_pooling(tmp_path: Path) -> None:
    assert read_bert(write_bert(tmp_path, pooling="cls_token")).config.pooling == "cls"


def test_a_prefix_of_the_tensors_and_unused_heads_do_not_matter(tmp_path: Path) -> None:
    tensors = random_tensors(prefix="bert.") | {"cls.predictions.bias": np.zeros(3, np.float32)}
    checkpoint = read_bert(write_bert(tmp_path, tensors))
    expected = random_tensors()["encoder.layer.1.output.dense.weight"]
    np.testing.assert_array_equal(checkpoint.tensor("layers.1.down.weight"), expected)


def test_roberta_skips_the_first_two_positions(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model_type": "roberta", "type_vocab_size": 1}
    tensors = random_tensors(CONFIG | changes)
    checkpoint = read_bert(write_bert(tmp_path, tensors, **changes))
    assert checkpoint.config.context_length == 30
    table = tensors["embeddings.position_embeddings.weight"][2:]
    expected = table + tensors["embeddings.token_type_embeddings.weight"][0]
    np.testing.assert_array_equal(checkpoint.tensor("position_embed"), expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "llama"}, "models of type 'llama' cannot be imported from safetensors"),
        ({"model_type": None}, "'model_type' is missing"),
        ({"hidden_act": "relu"}, "'hidden_act' is 'relu', expected one of gelu"),
        ({"position_embedding_type": "relative_key"}, "'position_embedding_type'"),
        ({"is_decoder": True}, "only encoders give embeddings"),
        ({"num_attention_heads": 5}, "expected a divisor of 24"),
        ({"num_hidden_layers": 0}, "expected an integer from 1"),
        ({"num_hidden_layers": 10**9}, "expected an integer from 1 to 1024"),
        ({"hidden_size": "big"}, "'hidden_size' is 'big'"),
        ({"vocab_size": 17}, "has the shape [16, 24], config.json asks for [17, 24]"),
        ({"num_hidden_layers": 3}, "tensor 'encoder.layer.2.attention.self.query.weight' is mis"),
        ({"num_hidden_layers": 1}, "has no role in a bert"),
    ],
)
def test_settings_that_cannot_be_done_are_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    assert said in refusal(write_bert(tmp_path, random_tensors(), **changes))


def test_a_classifier_of_one_label_is_a_cross_encoder(tmp_path: Path) -> None:
    source = write_bert(tmp_path / "m", cross_encoder_tensors(), pooling=None)
    config = read_bert(source).config
    assert (config.pair_separator, config.pooling, config.output_size) == (SEP, "cls", 1)
    bundle = import_checkpoint(source, tmp_path / "b", "b", ignore)
    assert (bundle.kind, bundle.encoder_config) == (ModelKind.RERANK, config)


@pytest.mark.parametrize("name", ["classifier", "classifier.out_proj"])
def test_a_classifier_of_several_labels_is_refused_as_one(tmp_path: Path, name: str) -> None:
    tensors = random_tensors() | {f"{name}.weight": np.zeros((3, 24), np.float32)}
    assert f"is a classifier ('{name}.weight' has the shape [3, 24])" in refusal(
        write_bert(tmp_path, tensors)
    )


def test_a_cross_encoder_without_its_pooler_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors() | {"classifier.weight": np.zeros((1, 24), np.float32)}
    assert "'pooler.dense.bias' is missing" in refusal(write_bert(tmp_path, tensors))


def test_a_cross_encoder_needs_a_tokenizer_of_pairs(tmp_path: Path) -> None:
    path = write_bert(tmp_path, cross_encoder_tensors(), pooling=None)
    tokenizer = Tokenizer.from_str(read_bert(path).tokenizer_json)
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="$A $B", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    assert "no special token between two texts" in refusal(path)


def test_modules_that_are_not_done_are_refused(tmp_path: Path) -> None:
    path = write_bert(tmp_path)
    write_modules(tmp_path, "Transformer", "Pooling", "Dense")
    assert "has a 'Dense' module" in refusal(path)
    write_modules(tmp_path, "Transformer", "Pooling")
    write_json(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_max_tokens": True})
    assert "asks for pooling_mode_max_tokens" in refusal(path)
    write_json(tmp_path / "modules.json", [{"type": "a.Pooling", "path": "../elsewhere"}])
    assert "names the folder '../elsewhere', which cannot be one" in refusal(path)
    write_json(tmp_path / "modules.json", "modules")
    assert "is not a list of modules" in refusal(path)


def test_missing_companions_are_named(tmp_path: Path) -> None:
    path = write_bert(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    assert "has neither tokenizer.json nor vocab.txt" in refusal(path)
    (tmp_path / "config.json").unlink()
    assert f"{tmp_path / 'config.json'} does not exist" in refusal(path)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", b"{", "config.json is not valid JSON"),
        ("config.json", b"[" * 100_000, "config.json is not valid JSON"),
        ("config.json", b"\xff", "config.json cannot be read as text"),
        ("config.json", b"[]", "config.json is not a JSON object"),
        ("tokenizer.json", b"{}", "tokenizer.json is not a tokenizer"),
        ("vocab.txt", b"[PAD]\n[UNK]\n", "vocab.txt has no token '[CLS]'"),
        ("vocab.txt", "\n".join([*VOCABULARY, "more"]).encode(), "the model has 16"),
        ("model.safetensors", b"\x10\0\0\0\0\0\0\0{}", "is not a whole safetensors file"),
    ],
)
def test_damaged_files_are_refused_in_one_line(
    tmp_path: Path, file: str, content: bytes, said: str
) -> None:
    path = write_bert(tmp_path)
    (tmp_path / file).write_bytes(content)
    assert said in refusal(path)


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["embeddings.LayerNorm.bias"][3] = np.nan
    with pytest.raises(ImportFailed, match="'embed_norm.bias' holds values that are no number"):
        import_checkpoint(write_bert(tmp_path / "m", tensors), tmp_path / "b", "b", ignore)
    assert not (tmp_path / "b").exists()


def test_a_vocabulary_makes_a_wordpiece_tokenizer(tmp_path: Path) -> None:
    import tokenizers

    write_bert(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_str(read_tokenizer(tmp_path, len(VOCABULARY), False))
    ids = [VOCABULARY.index(word) for word in ("the", "cat", "##s", "[UNK]")]
    assert tokenizer.encode("The cats xyz").ids == [CLS, *ids, SEP]


def test_an_import_makes_a_bundle_of_the_kind_embedding(tmp_path: Path) -> None:
    bundle = import_checkpoint(write_bert(tmp_path / "m"), tmp_path / "tiny", "tiny", ignore)
    assert (bundle.kind, bundle.weight_format) == (ModelKind.EMBEDDING, "f32")
    assert bundle.encoder_config == read_bert(tmp_path / "m" / "model.safetensors").config
    assert decode_manifest(encode_manifest(bundle.manifest)) == bundle.manifest
    bundle.verify()
    with pytest.raises(BundleError, match="tiny is an embedding model; it cannot write text"):
        _ = bundle.config


def test_a_bundle_without_a_kind_is_a_model_that_writes(tmp_path: Path) -> None:
    source = write_tiny_llama_gguf(tmp_path / "tiny.gguf")
    bundle = import_checkpoint(source, tmp_path / "tiny", "tiny", ignore)
    manifest = tmp_path / "tiny" / "model.json"
    manifest.write_text(manifest.read_text("utf-8").replace('"kind": "generation",', ""), "utf-8")
    assert '"kind"' not in manifest.read_text("utf-8")
    assert Bundle.open(bundle.path).kind is ModelKind.GENERATION
    with pytest.raises(BundleError, match="tiny is no embedding model"):
        _ = bundle.encoder_config


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / ENCODER_FILE).unlink(), "encoder.onnx is missing"),
        (lambda folder: replace(folder, '"embedding"', '"other"'), "the unknown kind 'other'"),
        (lambda folder: replace(folder, '"num_heads": 3', '"num_heads": 0'), "do not fit together"),
        (lambda folder: replace(folder, '"pooling"', '"x"'), "wrong value None for 'pooling'"),
    ],
)
def test_damaged_bundles_are_refused(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    source = write_bert(tmp_path / "m")
    import_checkpoint(source, tmp_path / "tiny", "tiny", ignore)
    folder = Path(shutil.copytree(tmp_path / "tiny", tmp_path / "copy"))
    damage(folder)
    with pytest.raises(BundleError, match=said):
        Bundle.open(folder)


def replace(folder: Path, old: str, new: str) -> None:
    path = folder / "model.json"
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")


def test_half_precision_weights_are_widened(tmp_path: Path) -> None:
    tensors = {name: array.astype(np.float16) for name, array in random_tensors().items()}
    path = write_bert(tmp_path)
    path.write_bytes(safetensors_bytes(tensors))
    assert read_bert(path).tensor("layers.0.q.bias").dtype == np.float32
