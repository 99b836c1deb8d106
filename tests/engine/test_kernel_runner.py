"""The kernels' whole step against the formulas, and against the same step in other company."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.bundle import Bundle
from engine.errors import BundleError, StepInterrupted
from engine.export.panels import PANELS_FILE, PANELS_INDEX_FILE
from engine.importers.gguf import read_gguf
from engine.kernel_runner import KernelRunner
from engine.panel_weights import PanelWeights, has_panels
from tests.batches import Span, make_batch
from tests.loaded_model import LoadedModel, load_model
from tests.numpy_forward import numpy_forward
from tests.tiny_model import import_tiny_model

VOCAB = 320
TOKENS = np.random.default_rng(1).integers(0, VOCAB, 100).tolist()
TABLE = [6, 0, 5, 1, 4, 2, 3]


def relative_rms(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


@pytest.fixture(scope="module")
def model(tiny_bundle: Bundle) -> LoadedModel:
    return load_model(tiny_bundle, num_threads=2, kernels="auto")


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_the_logits_are_those_of_the_file(quant: str, tmp_path: Path) -> None:
    """Every storage is kept exactly: what is left are activations in 8 bits."""
    bundle = import_tiny_model(tmp_path, quant=quant)
    oracle = numpy_forward(read_gguf(Path(bundle.source.path)), TOKENS)
    found = load_model(bundle, "f32", kernels="auto").logits_of(TOKENS, TABLE)
    assert relative_rms(found, oracle) < 0.03


def test_the_logits_are_near_those_of_the_sessions(tiny_bundle: Bundle) -> None:
    """Two ways to compute the same weights with activations in 8 bits."""
    kernels, sessions = (
        load_model(tiny_bundle, "f32", kernels=kernels).logits_of(TOKENS, TABLE)
        for kernels in ("auto", "onnxruntime")
    )
    assert relative_rms(kernels, sessions) < 0.04
    assert not np.array_equal(kernels, sessions)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_any_number_of_threads_gives_the_same_bits(
    tiny_bundle: Bundle, model: LoadedModel, num_threads: int
) -> None:
    other = load_model(tiny_bundle, num_threads=num_threads, kernels="auto")
    assert np.array_equal(other.logits_of(TOKENS, TABLE), model.logits_of(TOKENS, TABLE))


@pytest.mark.parametrize("chunks", [(1,), (7, 1, 30), (99, 1), (64,)])
def test_chunks_give_the_same_bits(model: LoadedModel, chunks: tuple[int, ...]) -> None:
    whole = model.logits_of(TOKENS, TABLE)
    assert np.array_equal(model.logits_of(TOKENS, TABLE, chunks), whole)


def test_only_the_rows_that_are_wanted_are_computed(model: LoadedModel) -> None:
    spans = [Span(TOKENS[:20], [0, 1]), Span(TOKENS[20:50], [2, 3])]
    everything = model.runner.execute(make_batch(spans)).copy()
    last = model.runner.execute(make_batch(spans, rows="last"))
    assert np.array_equal(last, everything[[19, 49]])


def test_a_step_without_rows_writes_its_keys(model: LoadedModel) -> None:
    whole = model.logits_of(TOKENS[:41], TABLE)
    nothing = model.runner.execute(make_batch([Span(TOKENS[:40], TABLE)], rows="none"))
    assert nothing.shape == (0, VOCAB)
    assert np.array_equal(model.logits(Span(TOKENS[40:41], TABLE, 40)), whole[40:])


def test_a_row_that_is_no_number_stays_alone(tiny_bundle: Bundle) -> None:
    model = load_model(tiny_bundle, nan_token=9, kernels="auto")
    logits = model.logits(Span([1, 2, 3], [0]), Span([1, 9, 3], [1]), Span([4, 5], [2]))
    assert np.isnan(logits).all(axis=1).tolist() == [False] * 4 + [True, True] + [False] * 2
    assert np.isfinite(logits[[0, 1, 2, 3, 6, 7]]).all()


def test_an_odd_size_has_no_panels(tmp_path: Path) -> None:
    bundle = import_tiny_model(tmp_path, head_size=16, quant="F32")
    assert not has_panels(bundle)
    assert not (bundle.path / PANELS_FILE).exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"embed": {"bits": 4}}'])
def test_a_damaged_index_is_refused(text: str, tmp_path: Path) -> None:
    bundle = import_tiny_model(tmp_path)
    (bundle.path / PANELS_INDEX_FILE).write_text(text)
    with pytest.raises(BundleError, match=r"panels.json is damaged .*hexlm pull tiny --force"):
        PanelWeights(bundle, 64)


def test_panels_that_end_too_early_are_refused(tmp_path: Path) -> None:
    bundle = import_tiny_model(tmp_path)
    with (bundle.path / PANELS_FILE).open("r+b") as stream:
        stream.truncate(4096)
    with pytest.raises(BundleError, match="past the end of the file"):
        PanelWeights(bundle, 64)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_interrupted_step_can_be_computed_again(
    tiny_bundle: Bundle, model: LoadedModel, num_threads: int
) -> None:
    other = load_model(tiny_bundle, num_threads=num_threads, kernels="auto")
    for tokens in (TOKENS, TOKENS[:1]):
        other.runner.interrupt()
        with pytest.raises(StepInterrupted):
            other.logits_of(tokens, TABLE)
    assert np.array_equal(other.logits_of(TOKENS, TABLE), model.logits_of(TOKENS, TABLE))


class HelpersWhoComeLate:
    """In place of a pool of threads: they begin when all is done, or are told not to come."""

    def __init__(self, come: bool) -> None:
        self._come = come

    def submit(self, work: Callable[..., bool], part: int) -> HelpersWhoComeLate:
        self._work = partial(work, part)
        return self

    def cancel(self) -> bool:
        return not self._come

    def result(self) -> bool:
        return self._work()


@pytest.mark.parametrize("come", [True, False])
def test_nobody_waits_for_a_thread_that_comes_late(
    tiny_bundle: Bundle, model: LoadedModel, come: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = load_model(tiny_bundle, num_threads=2, kernels="auto")
    assert isinstance(late.runner, KernelRunner)
    monkeypatch.setattr(late.runner, "_helpers", HelpersWhoComeLate(come))
    found = late.logits_of(TOKENS, TABLE, chunks=(60,))
    assert np.array_equal(found, model.logits_of(TOKENS, TABLE))
