"""The encoder's graph against plain numpy: poolings, activations, padding and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.batch import Float32Array
from engine.encoder import Encoder, EncoderSettings, load_encoder
from engine.errors import BundleError, DeviceError, DeviceUnavailable
from engine.export.exporter import import_checkpoint
from tests.bert_folder import CONFIG, cross_encoder_tensors, random_tensors, write_bert
from tests.numpy_encoder import encode_one, score_pair

TEXTS = [[2, 5, 6, 7, 8, 9, 3], [2, 3], [2, 10, 11, 3], [2, *[12, 13, 14, 15] * 6, 3]]

PAIRS = [
    ([2, 5, 6, 3], [7, 8, 9, 10, 3]),
    ([2, 11, 3], [5, 3]),
    ([2, 12, 13, 14, 15, 5, 6, 3], [*[7, 8] * 6, 3]),
    ([2, 5, 6, 3], [10, 9, 8, 7, 3]),
]
"""A query up to its separator, and a document."""


def ignore(*progress: object) -> None:
    pass


def settings(folder: Path, **changes: Any) -> EncoderSettings:
    values: dict[str, Any] = {"device": "cpu", "num_threads": 2, "max_model_len": None}
    return EncoderSettings(folder, **(values | changes))


def tiny_encoder(folder: Path, **model: Any) -> Encoder:
    source = write_bert(folder / "m", **model)
    bundle = import_checkpoint(source, folder / "tiny", "tiny", ignore)
    return load_encoder(settings(bundle.path), ignore).encoder


@pytest.mark.parametrize(
    ("pooling", "changes"),
    [
        ("mean_tokens", {}),
        ("cls_token", {}),
        ("mean_tokens", {"hidden_act": "gelu_new"}),
        ("mean_tokens", {"model_type": "xlm-roberta", "type_vocab_size": 1}),
    ],
)
def test_the_graph_computes_what_numpy_does(
    tmp_path: Path, pooling: str, changes: dict[str, Any]
) -> None:
    config = CONFIG | changes
    tensors = random_tensors(config)
    encoder = tiny_encoder(tmp_path, tensors=tensors, pooling=pooling, **changes)
    first_position = 2 if "roberta" in config["model_type"] else 0
    expected = [
        encode_one(tensors, config, ids, pooling.partition("_")[0], first_position) for ids in TEXTS
    ]
    difference = np.abs(encoder.encode(TEXTS) - np.array(expected)).max()
    assert difference < 1e-5, f"largest difference {difference:.2g}"


@pytest.mark.parametrize(
    ("changes", "head"),
    [
        ({}, ("pooler.dense", "classifier")),
        (
            {"model_type": "xlm-roberta", "type_vocab_size": 1},
            ("classifier.dense", "classifier.out_proj"),
        ),
    ],
    ids=["bert", "roberta"],
)
def test_a_cross_encoder_gives_the_logits_that_numpy_does(
    tmp_path: Path, changes: dict[str, Any], head: tuple[str, str]
) -> None:
    config = CONFIG | changes
    tensors = cross_encoder_tensors(config)
    encoder = tiny_encoder(tmp_path, tensors=tensors, pooling=None, **changes)
    is_roberta = "roberta" in config["model_type"]
    expected = []
    for query, document in PAIRS:
        types = [0] * len(query) + [0 if is_roberta else 1] * len(document)
        ids, first = query + document, 2 if is_roberta else 0
        expected.append([score_pair(tensors, config, ids, types, head, first)])
    scores = encoder.encode([query + document for query, document in PAIRS])
    difference = np.abs(scores - np.array(expected)).max()
    assert difference < 1e-5, f"largest difference {difference:.2g}"
    assert np.ptp(expected) > 0.02


def test_a_text_has_the_same_vector_alone_and_padded_in_a_batch(tmp_path: Path) -> None:
    encoder = tiny_encoder(tmp_path)
    together = encoder.encode(TEXTS)
    alone = np.concatenate([encoder.encode([ids]) for ids in TEXTS])
    assert np.abs(together - alone).max() < 1e-6
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-6)


def test_facts_tell_the_limits(tmp_path: Path) -> None:
    bundle = import_checkpoint(write_bert(tmp_path / "m"), tmp_path / "tiny", "tiny", ignore)
    phases: list[str] = []
    facts = load_encoder(settings(bundle.path, max_model_len=9), phases.append).facts
    assert (facts.max_model_len, facts.vocab_size, facts.weight_format) == (9, 16, "f32")
    assert (facts.device, facts.num_threads) == ("cpu", 2)
    assert phases == ["loading the weights", "warming up"]


def test_an_npu_is_not_promised(tmp_path: Path) -> None:
    bundle = import_checkpoint(write_bert(tmp_path / "m"), tmp_path / "tiny", "tiny", ignore)
    with pytest.raises(DeviceUnavailable, match="run on the CPU only"):
        load_encoder(settings(bundle.path, device="npu"), ignore)


def test_a_graph_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    bundle = import_checkpoint(write_bert(tmp_path / "m"), tmp_path / "tiny", "tiny", ignore)
    graph = bundle.path / "encoder.onnx"
    graph.write_bytes(b"\xff" * graph.stat().st_size)
    with pytest.raises(BundleError, match=r"encoder\.onnx cannot be loaded") as caught:
        load_encoder(settings(bundle.path), ignore)
    assert "\n" not in str(caught.value)


def test_what_is_no_number_is_an_error_of_the_device(tmp_path: Path) -> None:
    class Broken:
        def run(self, **inputs: object) -> Float32Array:
            return np.full((1, 24), np.nan, np.float32)

    config = tiny_encoder(tmp_path).config
    with pytest.raises(DeviceError, match="no numbers"):
        Encoder(config, Broken()).encode([[1]])  # type: ignore[arg-type]
