"""The real embedding model: the vectors of its authors' own program, and what they are good for."""

from __future__ import annotations

import numpy as np
import pytest

from engine.bundle import Bundle
from engine.encoder import Encoder, EncoderSettings, load_encoder
from engine.errors import BundleError
from server.encoder_tokenizer import EncoderTokenizer
from server.model_store import ModelStore
from server.sources.errors import StoreError

pytestmark = pytest.mark.model
EMBEDDER = "all-minilm-l6-v2"

# The first six numbers as transformers 5.24 and torch 2.13 compute them in float32, with mean
# pooling and normalization.
REFERENCE = {
    "The cat sits on the mat.": [0.134177, -0.0329, -0.024804, 0.041439, -0.036348, 0.041814],
    "A kitten is sitting on a rug.": [
        0.052692, -0.016797, 0.01598, 0.045934, -0.043073, 0.040254,
    ],
    "Stock markets fell sharply today.": [
        0.040052, -0.026063, 0.082353, 0.056358, -0.013606, 0.004121,
    ],
    "Ünïcode 中文 don't naïve!": [-0.026603, 0.088766, 0.045597, 0.003495, -0.053028, -0.008033],
}  # fmt: skip
TOKEN_IDS = (101, 1996, 4937, 7719, 2006, 1996, 13523, 1012, 102)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    try:
        return ModelStore().open(EMBEDDER)
    except (StoreError, BundleError) as error:
        pytest.fail(f"the tests marked `model` need {EMBEDDER}: run `make test` ({error})")


@pytest.fixture(scope="module")
def tokenizer(bundle: Bundle) -> EncoderTokenizer:
    return EncoderTokenizer.from_file(bundle.tokenizer_path)


@pytest.fixture(scope="module")
def encoder(bundle: Bundle) -> Encoder:
    settings = EncoderSettings(bundle.path, "cpu", 2, None)
    return load_encoder(settings, lambda phase: None).encoder


def test_text_becomes_the_tokens_that_the_model_was_trained_with(
    tokenizer: EncoderTokenizer,
) -> None:
    assert tokenizer.encode("The cat sits on the mat.") == TOKEN_IDS
    assert len(tokenizer.encode("word " * 1000, 256)) == 256


def test_vectors_are_those_of_the_reference(encoder: Encoder, tokenizer: EncoderTokenizer) -> None:
    vectors = encoder.encode([tokenizer.encode(text) for text in REFERENCE])
    difference = np.abs(vectors[:, :6] - np.array(list(REFERENCE.values()))).max()
    assert difference < 2e-6, f"largest difference {difference:.2g}"


def test_near_meanings_have_near_vectors(encoder: Encoder, tokenizer: EncoderTokenizer) -> None:
    cat, kitten, stocks, _ = encoder.encode([tokenizer.encode(text) for text in REFERENCE])
    assert cat @ kitten > 0.6
    assert abs(cat @ stocks) < 0.2
    assert abs(kitten @ stocks) < 0.2


def test_a_batch_of_mixed_lengths_gives_the_vectors_of_each_text_alone(
    encoder: Encoder, tokenizer: EncoderTokenizer
) -> None:
    texts = [tokenizer.encode("word " * n) for n in (1, 3, 9, 27, 81, 243)]
    together = encoder.encode(texts)
    alone = np.concatenate([encoder.encode([text]) for text in texts])
    assert np.abs(together - alone).max() < 1e-6
