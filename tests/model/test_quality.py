"""The real model against the same file in float32: how much the import and int8 cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.bundle import Bundle
from engine.importers.gguf import read_gguf
from tests.loaded_model import load_model
from tests.numpy_forward import numpy_forward

pytestmark = pytest.mark.model
TEXT = Path(__file__).parent.parent / "data" / "night_ferry.txt"
NUM_TOKENS = 600
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """Log-probabilities [T, V] of the file's own values, and of the imported model."""

    token_ids: list[int]
    exact: Floats
    imported: Floats

    @property
    def mean_kl(self) -> float:
        """Mean Kullback-Leibler divergence of the imported model from the exact one, in nats."""
        return float((np.exp(self.exact) * (self.exact - self.imported)).sum(axis=-1).mean())

    @property
    def top_1_agreement(self) -> float:
        return float(np.mean(self.exact.argmax(axis=-1) == self.imported.argmax(axis=-1)))

    def perplexity(self, logprobs: Floats) -> float:
        following = logprobs[np.arange(len(self.token_ids) - 1), self.token_ids[1:]]
        return float(np.exp(-following.mean()))


def log_softmax(logits: NDArray[np.float32]) -> Floats:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


@pytest.fixture(scope="module")
def comparison(real_bundle: Bundle) -> Comparison:
    tokenizer = Tokenizer.from_file(str(real_bundle.tokenizer_path))
    token_ids: list[int] = tokenizer.encode(TEXT.read_text("utf-8")).ids[:NUM_TOKENS]
    assert len(token_ids) == NUM_TOKENS
    oracle = numpy_forward(read_gguf(Path(real_bundle.source.path)), token_ids)
    model = load_model(real_bundle, "int8", num_threads=2, max_tokens=NUM_TOKENS)
    imported = model.logits_of(token_ids, list(range(38)))
    return Comparison(token_ids, log_softmax(oracle), log_softmax(imported))


def test_the_imported_model_predicts_as_the_file_does(comparison: Comparison) -> None:
    assert comparison.mean_kl <= 0.01, f"KL {comparison.mean_kl:.5f}"
    agreement = comparison.top_1_agreement
    assert agreement >= 0.95, f"top-1 agreement {agreement:.4f}"


def test_the_imported_model_is_as_good_as_the_file(comparison: Comparison) -> None:
    """And good: the text is English, and the perplexity that of a small model that knows it."""
    exact = comparison.perplexity(comparison.exact)
    assert 15 < exact < 45
    assert abs(comparison.perplexity(comparison.imported) / exact - 1) < 0.02
