"""Which width is chosen, and that a model gives the same bits in either."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.bundle import Bundle
from engine.export import measured_width
from engine.export.exporter import decoder_writer, import_checkpoint
from engine.export.measured_width import measure_width_costs, with_measured_width
from engine.export.panels import PANELS_FILE, read_panels, read_panels_index
from engine.kernels.panel_matrix import PanelMatrix
from engine.panel_width import (
    PANEL_WIDTH_FILE,
    WidthChoice,
    WidthCosts,
    choose_width,
    encode_choice,
    read_choice,
)
from tests.engine.gguf_files import write_tiny_llama_gguf
from tests.loaded_model import load_model
from tests.tiny_model import import_tiny_model

ROOM = 16_000_000_000
TOKENS = np.random.default_rng(3).integers(0, 320, 80).tolist()
TABLE = list(range(6))
QUANTS = ["Q4_0", "Q4_1"]


def costs(
    row: tuple[float, float], prompt: tuple[float, float], num_weights: int = 10**9
) -> WidthCosts:
    """G operations per second in 4 and in 8 bits."""
    by_row, by_prompt = (
        dict(zip((4, 8), (rate * 1e9 for rate in rates), strict=True)) for rates in (row, prompt)
    )
    return WidthCosts(2, num_weights, by_row, by_prompt)


def test_a_turn_is_a_prompt_and_an_answer() -> None:
    found = costs((128, 64), (512, 1024))
    assert found.turn_s(4) == pytest.approx(2 * (1 + 1))
    assert found.turn_s(8) == pytest.approx(2 * (2 + 0.5))


@pytest.mark.parametrize(
    ("row", "prompt", "bits"),
    [
        ((128, 64), (512, 512), 4),  # bound by memory
        ((64, 128), (512, 512), 8),  # bound by unpacking
        ((128, 128), (512, 512), 4),  # no difference: the smaller one
        ((128, 132), (512, 528), 4),  # too small a difference
        ((128, 140), (512, 560), 8),
        ((128, 120), (256, 512), 8),  # prompts gain more than answers lose
    ],
)
def test_the_faster_width_is_taken_if_it_pays(
    row: tuple[float, float], prompt: tuple[float, float], bits: int
) -> None:
    choice = choose_width(costs(row, prompt), ROOM)
    assert choice.bits == bits
    assert "s with 4 bits" in choice.reason and "(2 threads)" in choice.reason


def test_what_does_not_fit_stays_narrow() -> None:
    faster = costs((64, 128), (512, 512), num_weights=9 * 10**9)
    choice = choose_width(faster, ROOM)
    assert choice.bits == 4
    assert choice.reason.endswith("but 8 bits take more than half of 16.0 GB of memory")
    assert choose_width(faster, 2 * ROOM).bits == 8


def test_a_choice_is_read_as_it_was_written(tmp_path: Path) -> None:
    choice = WidthChoice(8, "it is faster")
    (tmp_path / PANEL_WIDTH_FILE).write_text(encode_choice(choice, costs((1, 2), (3, 4))), "utf-8")
    assert read_choice(tmp_path) == choice


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"bits": "x", "reason": ""}'])
def test_a_bundle_that_does_not_say(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / PANEL_WIDTH_FILE).write_text(text)
    assert read_choice(tmp_path) is None


def import_measured(folder: Path, quant: str) -> Bundle:
    """A tiny model, however few its weights are."""
    source = write_tiny_llama_gguf(folder / "tiny.gguf", quant=quant)
    write = with_measured_width(decoder_writer("auto", None), 2, ROOM)
    return import_checkpoint(source, folder / "measured", "tiny", lambda *_: None, write)


@pytest.mark.usefixtures("kernels")
class TestMeasuredWidth:
    @pytest.mark.parametrize("quant", QUANTS)
    def test_a_model_in_wider_panels_gives_the_same_bits(
        self, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        narrow = import_tiny_model(tmp_path, quant=quant)

        def unpacking_is_slow(
            matrices: list[PanelMatrix], num_weights: int, num_threads: int
        ) -> WidthCosts:
            assert {matrix.form.bits for matrix in matrices} == {4}
            return costs((1, 2), (1, 2), num_weights)

        monkeypatch.setattr(measured_width, "MIN_WEIGHTS", 1)
        monkeypatch.setattr(measured_width, "measure_width_costs", unpacking_is_slow)
        wide = import_measured(tmp_path, quant)
        before, after = (read_panels_index(bundle.path) for bundle in (narrow, wide))
        assert list(before) == list(after)
        layers = [name for name in after if name.startswith("layers.")]
        assert {before[name].bits for name in layers} == {4}
        assert {after[name].bits for name in layers} == {8}
        assert {one.kind for one in after.values()} == {one.kind for one in before.values()}
        assert wide.weight_format == narrow.weight_format
        assert (choice := read_choice(wide.path)) is not None and choice.bits == 8
        assert not (wide.path / "wide").exists()
        found, expected = (
            load_model(bundle, num_threads=2, kernels="auto").logits_of(TOKENS, TABLE, (70, 1, 9))
            for bundle in (wide, narrow)
        )
        assert np.array_equal(found, expected)

    @pytest.mark.parametrize("quant", QUANTS)
    def test_what_is_measured_decides_and_is_kept(
        self, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(measured_width, "MIN_WEIGHTS", 1)
        bundle = import_measured(tmp_path, quant)
        choice = read_choice(bundle.path)
        assert choice is not None and choice.reason.startswith("the matrix products of a prompt")
        index = read_panels_index(bundle.path)
        assert {one.bits for name, one in index.items() if "layers." in name} == {choice.bits}
        assert PANEL_WIDTH_FILE in {file.name for file in bundle.manifest.files}

    def test_few_weights_and_wide_ones_are_not_measured(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bundle = import_measured(tmp_path, "Q4_0")
        assert read_choice(bundle.path) is None and (bundle.path / PANELS_FILE).exists()
        monkeypatch.setattr(measured_width, "MIN_WEIGHTS", 1)
        assert read_choice(import_measured(tmp_path, "Q8_0").path) is None
        assert read_choice(import_measured(tmp_path, "F32").path) is None

    @pytest.mark.parametrize("num_threads", [1, 2, 64])
    def test_every_width_and_size_of_step_is_measured(
        self, num_threads: int, tmp_path: Path
    ) -> None:
        bundle = import_tiny_model(tmp_path)
        index = read_panels_index(bundle.path)
        matrices = [
            read_panels(bundle.path, one) for name, one in index.items() if "layers." in name
        ]
        found = measure_width_costs(matrices, 1000, num_threads)
        assert (found.num_threads, found.num_weights) == (num_threads, 1000)
        for rates in (found.row_operations_per_s, found.prompt_operations_per_s):
            assert set(rates) == {4, 8} and min(rates.values()) > 0
