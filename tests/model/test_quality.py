"""The real model against the same file in float32: how much the import and KV formats cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.batch import Int32Array
from engine.bundle import Bundle
from engine.evaluate.divergence import Divergence, log_softmax
from engine.evaluate.scoring import Figures, ScoredBundle, ScoredCheckpoint, compare
from engine.importers.gguf import GgufCheckpoint, read_gguf
from engine.kv_guard import choose_kv_format, read_kv_noise
from tests.numpy_forward import numpy_forward

pytestmark = pytest.mark.model
TEXT = Path(__file__).parent.parent / "data" / "night_ferry.txt"
NUM_TOKENS = 600
KV_FORMATS = ("f32", "int8", "int8k4v", "int4")


@pytest.fixture(scope="module")
def token_ids(real_bundle: Bundle) -> Int32Array:
    tokenizer = Tokenizer.from_file(str(real_bundle.tokenizer_path))
    ids = tokenizer.encode(TEXT.read_text("utf-8")).ids[:NUM_TOKENS]
    assert len(ids) == NUM_TOKENS
    return np.array(ids, np.int32)[None]


@pytest.fixture(scope="module")
def checkpoint(real_bundle: Bundle) -> GgufCheckpoint:
    return read_gguf(Path(real_bundle.source.path))


@pytest.fixture(scope="module")
def figures(
    real_bundle: Bundle, checkpoint: GgufCheckpoint, token_ids: Int32Array
) -> dict[str, Figures]:
    """By KV format; `file` is the file in float32."""
    reference = ScoredCheckpoint("file", checkpoint, real_bundle.summary.num_parameters)
    candidates = [ScoredBundle(name, real_bundle, name) for name in KV_FORMATS]
    found = compare(reference, candidates, token_ids, 2, lambda label, done, total: None)
    return {one.label: one for one in found}


def divergence(one: Figures) -> Divergence:
    assert one.divergence is not None
    return one.divergence


def test_the_reference_is_the_oracle(checkpoint: GgufCheckpoint, token_ids: Int32Array) -> None:
    """The float32 forward of the engine's own graphs against the textbook formulas in numpy."""
    part = token_ids[:, :100]
    scored = ScoredCheckpoint("file", checkpoint, 0)
    rows = np.concatenate([part.copy() for part in scored.logits(part, 2)])
    found = Divergence()
    found.add(log_softmax(numpy_forward(checkpoint, part[0].tolist())), log_softmax(rows))
    assert found.mean_kl < 1e-7
    assert found.top_1_agreement == 1


def test_the_imported_model_predicts_as_the_file_does(figures: dict[str, Figures]) -> None:
    found = divergence(figures["int8"])
    assert found.mean_kl <= 0.01, f"KL {found.mean_kl:.5f}"
    assert found.top_1_agreement >= 0.95, f"top-1 agreement {found.top_1_agreement:.4f}"


def test_the_imported_model_is_as_good_as_the_file(figures: dict[str, Figures]) -> None:
    """And good: the text is English, and the perplexity that of a small model that knows it."""
    exact = figures["file"].score.perplexity
    assert 15 < exact < 45
    assert abs(figures["int8"].score.perplexity / exact - 1) < 0.02


def test_the_guard_knows_which_kv_formats_this_model_bears(
    real_bundle: Bundle, figures: dict[str, Figures]
) -> None:
    """int4 keys are what it warns of, and what costs most."""
    noise = read_kv_noise(real_bundle.path)
    assert choose_kv_format("auto", noise).kv_format == "int8"
    risky = {name for name in KV_FORMATS if choose_kv_format(name, noise).is_risky}
    assert risky == {"int4"}
    by_format = {name: divergence(figures[name]).mean_kl for name in KV_FORMATS}
    assert by_format["int8"] < by_format["f32"] + 0.005
    assert by_format["int8k4v"] < 0.05 < by_format["int4"]
