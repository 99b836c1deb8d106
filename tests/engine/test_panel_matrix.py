"""Panels: whatever the blocks are, they come back as they went in, in the form that is smallest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.panel_matrix import (
    PANEL_FORMS,
    Blocks,
    PanelForm,
    PanelKind,
    choose_form,
    pack_panels,
    unpack_panels,
    widen_panels,
)


def random_blocks(
    kind: PanelKind, bits: int, num_rows: int = 40, num_blocks: int = 3, seed: int = 0
) -> Blocks:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1 << bits, (num_rows, 32 * num_blocks), np.uint8)
    scales = rng.uniform(0.001, 2, (num_rows, num_blocks)).astype(np.float16).astype(np.float32)
    if kind is PanelKind.ZERO:
        minima = -rng.integers(0, 1 << bits, scales.shape).astype(np.float32) * scales
    else:
        minima = rng.normal(0, 1, scales.shape).astype(np.float16).astype(np.float32)
    if kind is PanelKind.WIDE:
        scales += np.float32(1e-6)
    return Blocks(bits, values, scales, minima)


def equal(a: Blocks, b: Blocks) -> bool:
    return (
        a.bits == b.bits
        and np.array_equal(a.values, b.values)
        and np.array_equal(a.scales, b.scales)
        and np.array_equal(a.minima, b.minima)
    )


@pytest.mark.parametrize("form", PANEL_FORMS, ids=lambda form: f"{form.bits}-{form.kind}")
@pytest.mark.parametrize("num_rows", [1, 16, 40])
def test_packing_loses_nothing(form: PanelForm, num_rows: int) -> None:
    blocks = random_blocks(form.kind, form.bits, num_rows)
    assert choose_form(blocks) == form
    packed = pack_panels(blocks, form)
    assert packed.data.shape == (-(-num_rows // 16), 3, form.block_bytes)
    assert (packed.num_rows, packed.num_cols) == (num_rows, 96)
    assert equal(unpack_panels(packed), blocks)


@pytest.mark.parametrize("kind", PanelKind)
@pytest.mark.parametrize("num_rows", [1, 16, 40])
def test_wider_panels_hold_the_same_weights(kind: PanelKind, num_rows: int) -> None:
    blocks = random_blocks(kind, 4, num_rows)
    wide = widen_panels(pack_panels(blocks, choose_form(blocks)))
    assert wide.form == PanelForm(8, kind)
    in_bytes = Blocks(8, blocks.values, blocks.scales, blocks.minima)
    assert equal(unpack_panels(wide), in_bytes)
    assert np.array_equal(wide.data, pack_panels(in_bytes, wide.form).data)


def test_a_block_of_zeros_has_a_zero_point() -> None:
    zeros = Blocks(
        4,
        np.zeros((16, 32), np.uint8),
        np.zeros((16, 1), np.float32),
        np.zeros((16, 1), np.float32),
    )
    assert choose_form(zeros).kind is PanelKind.ZERO
    assert equal(unpack_panels(pack_panels(zeros, choose_form(zeros))), zeros)


def test_a_scale_that_float16_does_not_hold_is_kept() -> None:
    for scale in (1e-8, 1e6, 0.1):
        blocks = random_blocks(PanelKind.ZERO, 8)
        blocks.scales[3, 1], blocks.minima[3, 1] = np.float32(scale), np.float32(0)
        form = choose_form(blocks)
        assert form.kind is PanelKind.WIDE
        assert equal(unpack_panels(pack_panels(blocks, form)), blocks)


@settings(deadline=None, max_examples=50)
@given(
    form=st.sampled_from(PANEL_FORMS),
    num_rows=st.integers(1, 50),
    num_blocks=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_any_blocks_come_back(form: PanelForm, num_rows: int, num_blocks: int, seed: int) -> None:
    blocks = random_blocks(form.kind, form.bits, num_rows, num_blocks, seed)
    assert equal(unpack_panels(pack_panels(blocks, choose_form(blocks))), blocks)


def test_the_weights_are_scale_times_value_plus_minimum() -> None:
    blocks = Blocks(
        4,
        np.full((1, 64), 3, np.uint8),
        np.array([[2, 4]], np.float32),
        np.array([[-1, 5]], np.float32),
    )
    assert blocks.dequantize().tolist() == [[5.0] * 32 + [17.0] * 32]
