"""Comparing models: the figures are those of whole runs, however they are cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from engine.batch import Float32Array, Int32Array
from engine.bundle import Bundle
from engine.errors import BundleError
from engine.evaluate.divergence import Divergence, TextScore, log_softmax
from engine.evaluate.scoring import ROWS_PER_STEP, ScoredBundle, ScoredCheckpoint, compare
from tests.loaded_model import load_model
from tests.memory_checkpoint import (
    MemoryCheckpoint,
    random_checkpoint,
    tiny_config,
    write_checkpoint,
)

TEXTS = np.random.default_rng(2).integers(0, 272, (2, ROWS_PER_STEP + 20)).astype(np.int32)
pytestmark = pytest.mark.usefixtures("kernels")


def quiet(label: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Scripted:
    """Predicts what it was told, for any text."""

    rows: Float32Array
    label: str = "scripted"
    weight_format: str = "none"
    kv_format: str = "f32"
    num_weight_bytes: int = 7
    kv_bytes_per_token: int = 3

    def logits(self, token_ids: Int32Array, num_threads: int) -> Iterator[Float32Array]:
        length = token_ids.shape[1]
        for text in range(len(token_ids)):
            for start in range(0, length, ROWS_PER_STEP):
                end = min(start + ROWS_PER_STEP, length)
                yield self.rows[text * length + start : text * length + end]


def random_rows(seed: int, vocab: int = 272) -> Float32Array:
    return np.random.default_rng(seed).standard_normal((TEXTS.size, vocab)).astype(np.float32)


def test_figures_are_sums_over_all_texts() -> None:
    reference, candidate = random_rows(0), random_rows(1)
    first, second = compare(Scripted(reference), [Scripted(candidate)], TEXTS, 1, quiet)
    whole, score = Divergence(), TextScore()
    whole.add(log_softmax(reference), log_softmax(candidate))
    for text, rows in zip(TEXTS, np.split(candidate, 2), strict=True):
        score.add(log_softmax(rows), text[1:])
    assert first.divergence is None and second.divergence is not None
    assert second.divergence.num_tokens == TEXTS.size
    assert second.divergence.mean_kl == pytest.approx(whole.mean_kl, rel=1e-12)
    assert second.divergence.top_1_agreement == whole.top_1_agreement
    assert second.score.num_scored == score.num_scored == TEXTS.size - 2
    assert second.score.perplexity == pytest.approx(score.perplexity, rel=1e-12)
    assert (second.num_weight_bytes, second.kv_bytes_per_token) == (7, 3)


def test_every_candidate_is_compared_with_the_same_reference() -> None:
    rows = random_rows(0)
    _, same, other = compare(
        Scripted(rows), [Scripted(rows), Scripted(random_rows(1))], TEXTS, 1, quiet
    )
    assert same.divergence is not None and other.divergence is not None
    assert same.divergence.mean_kl == 0 < other.divergence.mean_kl


@pytest.mark.parametrize("vocab", [100, 300])
def test_another_vocabulary_is_refused(vocab: int) -> None:
    with pytest.raises(BundleError, match=f"a vocabulary of {vocab}, the reference one of 272"):
        compare(Scripted(random_rows(0)), [Scripted(random_rows(1, vocab))], TEXTS, 1, quiet)


def test_progress_counts_tokens_of_each_model() -> None:
    seen: list[tuple[str, int, int]] = []
    compare(
        Scripted(random_rows(0)),
        [Scripted(random_rows(0), label="second")],
        TEXTS,
        1,
        lambda label, done, total: seen.append((label, done, total)),
    )
    total, length = TEXTS.size, TEXTS.shape[1]
    steps = [ROWS_PER_STEP, length, length + ROWS_PER_STEP, total]
    assert seen == [(name, done, total) for name in ("scripted", "second") for done in steps]


@pytest.fixture(scope="module")
def model(
    kernels: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[MemoryCheckpoint, Bundle]:
    checkpoint = random_checkpoint(tiny_config())
    return checkpoint, write_checkpoint(checkpoint, tmp_path_factory.mktemp("scored") / "model")


def test_a_bundle_is_run_as_the_engine_runs_it(model: tuple[MemoryCheckpoint, Bundle]) -> None:
    _, bundle = model
    rows = list(ScoredBundle("model", bundle, "int8").logits(TEXTS, 1))
    assert [len(part) for part in rows] == [ROWS_PER_STEP, 20] * 2
    loaded = load_model(bundle, "int8")
    expected = loaded.logits_of(TEXTS[1].tolist(), list(range(6)))
    scored = [part.copy() for part in ScoredBundle("model", bundle, "int8").logits(TEXTS[1:], 1)]
    np.testing.assert_array_equal(np.concatenate(scored), expected)


def test_float32_weights_do_not_diverge_from_the_checkpoint(
    model: tuple[MemoryCheckpoint, Bundle],
) -> None:
    checkpoint, bundle = model
    reference = ScoredCheckpoint("file", checkpoint, num_parameters=10)
    exact, rounded = (ScoredBundle(name, bundle, name) for name in ("f32", "int8"))
    figures = compare(reference, [exact, rounded], TEXTS, 1, quiet)
    assert [one.kv_format for one in figures] == ["f32", "f32", "int8"]
    assert figures[0].num_weight_bytes == 40
    first, second = (one.divergence for one in figures[1:])
    assert first is not None and second is not None
    assert first.mean_kl < 1e-8 < second.mean_kl < 0.01
    assert first.top_1_agreement == 1


def test_sizes_are_those_of_the_files_and_pages(
    model: tuple[MemoryCheckpoint, Bundle], tmp_path: Path
) -> None:
    _, bundle = model
    scored = ScoredBundle("model", bundle, "int8")
    assert scored.num_weight_bytes == bundle.weights_path.stat().st_size
    assert scored.kv_bytes_per_token == 2 * 2 * 2 * (32 + 4)
    assert scored.weight_format == "f32"
