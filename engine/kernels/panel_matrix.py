"""Weights as the step kernel reads them: panels of 16 outputs, in blocks of 32 inputs.

A panel is one stretch of memory, block after block, so that a core streams it from front to back.
A block holds, for its 16 outputs:

    values    8 groups of 4 inputs, each [16 outputs, 4 inputs] bytes: what one dot-product
              instruction takes; with 4 bits, group j in the low nibbles of group j + 4's bytes
    scales    [16]
    offsets   [16]: what the `PanelKind` says

The weight of an input is scale * value + minimum with a real minimum per block, so every 4-, 5-
and 8-bit block format of ggml, AWQ and GPTQ fits without loss. Knows no files and no models.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

BLOCK_INPUTS = 32
PANEL_OUTPUTS = 16
_GROUP_INPUTS = 4
_GROUPS = BLOCK_INPUTS // _GROUP_INPUTS

Float32Array = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class PanelKind(StrEnum):
    """How a block's scales and offsets are stored."""

    ZERO = "zero"  # float16 scale, uint8 zero point: minimum = -zero * scale
    MINIMUM = "minimum"  # float16 scale, float16 minimum
    WIDE = "wide"  # float32 scale, float32 minimum


@dataclass(frozen=True, slots=True)
class PanelForm:
    """How a block looks in memory. `bits` per value: 4 or 8."""

    bits: int
    kind: PanelKind

    @property
    def values_bytes(self) -> int:
        return PANEL_OUTPUTS * BLOCK_INPUTS * self.bits // 8

    @property
    def block_bytes(self) -> int:
        per_output = {PanelKind.ZERO: 3, PanelKind.MINIMUM: 4, PanelKind.WIDE: 8}[self.kind]
        return self.values_bytes + PANEL_OUTPUTS * per_output


# Their order is their number in the step kernel.
PANEL_FORMS = (
    PanelForm(4, PanelKind.ZERO),
    PanelForm(4, PanelKind.MINIMUM),
    PanelForm(4, PanelKind.WIDE),
    PanelForm(8, PanelKind.ZERO),
    PanelForm(8, PanelKind.MINIMUM),
    PanelForm(8, PanelKind.WIDE),
)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix [N, K]: weight = scale * value + minimum, one of each per 32 inputs.

    `values` [N, K] uint8, below 2 ** `bits`; `scales`, `minima` [N, K / 32] float32.
    """

    bits: int
    values: Bytes
    scales: Float32Array
    minima: Float32Array

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.values.shape[0]), int(self.values.shape[1])

    def rows(self, start: int, stop: int) -> Blocks:
        chosen = slice(start, stop)
        return Blocks(self.bits, self.values[chosen], self.scales[chosen], self.minima[chosen])

    def dequantize(self) -> Float32Array:
        """[N, K] float32."""
        values = self.values.reshape(len(self.values), -1, BLOCK_INPUTS).astype(np.float32)
        weights = values * self.scales[:, :, None] + self.minima[:, :, None]
        return weights.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class PanelMatrix:
    """`data` [panels, blocks, bytes of a block] uint8; outputs past `num_rows` are zero."""

    form: PanelForm
    num_rows: int
    data: Bytes

    @property
    def num_cols(self) -> int:
        return int(self.data.shape[1]) * BLOCK_INPUTS


def choose_form(blocks: Blocks) -> PanelForm:
    """The smallest one that loses nothing."""
    return PanelForm(blocks.bits, _kind(blocks))


def pack_panels(blocks: Blocks, form: PanelForm) -> PanelMatrix:
    """`form` must hold the blocks without loss (`choose_form`)."""
    if form.kind is PanelKind.WIDE:
        offsets = _by_panel(blocks.minima, np.float32)
    elif form.kind is PanelKind.MINIMUM:
        offsets = _by_panel(blocks.minima, np.float16)
    else:
        offsets = _by_panel(_zeros(blocks), np.uint8)
    scales = _by_panel(blocks.scales, np.float32 if form.kind is PanelKind.WIDE else np.float16)
    data = np.concatenate([_pack_values(blocks), scales, offsets], axis=2)
    return PanelMatrix(form, blocks.shape[0], data)


def unpack_panels(matrix: PanelMatrix) -> Blocks:
    """What `pack_panels` was given."""
    form, data = matrix.form, matrix.data
    scale_type: type[np.generic] = np.float32 if form.kind is PanelKind.WIDE else np.float16
    at = form.values_bytes
    end = at + PANEL_OUTPUTS * np.dtype(scale_type).itemsize
    scales = _by_row(data[:, :, at:end], scale_type, matrix.num_rows)
    if form.kind is PanelKind.ZERO:
        minima = -_by_row(data[:, :, end:], np.uint8, matrix.num_rows) * scales
    else:
        minima = _by_row(data[:, :, end:], scale_type, matrix.num_rows)
    values = _unpack_values(data[:, :, :at], form.bits)[: matrix.num_rows]
    return Blocks(form.bits, values, scales, minima)


def widen_panels(matrix: PanelMatrix) -> PanelMatrix:
    """The same weights, a byte for each value of 4 bits: more to read and nothing to unpack."""
    at = matrix.form.values_bytes
    values, rest = matrix.data[:, :, :at], matrix.data[:, :, at:]
    wide = np.concatenate([values & 15, values >> 4, rest], axis=2)
    return PanelMatrix(PanelForm(8, matrix.form.kind), matrix.num_rows, wide)


def _kind(blocks: Blocks) -> PanelKind:
    if not _fits_float16(blocks.scales):
        return PanelKind.WIDE
    if np.array_equal(-_zeros(blocks) * blocks.scales, blocks.minima):
        return PanelKind.ZERO
    return PanelKind.MINIMUM if _fits_float16(blocks.minima) else PanelKind.WIDE


def _fits_float16(x: Float32Array) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.array_equal(x.astype(np.float16).astype(np.float32), x))


def _zeros(blocks: Blocks) -> Float32Array:
    """[N, K / 32]: the whole numbers in 0..255 that are nearest to -minimum / scale."""
    ratio = np.divide(
        -blocks.minima, blocks.scales, out=np.zeros_like(blocks.minima), where=blocks.scales != 0
    )
    return np.clip(np.rint(ratio), 0, 255)


def _by_panel(x: Float32Array, dtype: type[np.generic]) -> Bytes:
    """[N, blocks] → [panels, blocks, bytes of 16 elements]."""
    padded = np.zeros((-(-len(x) // PANEL_OUTPUTS) * PANEL_OUTPUTS, x.shape[1]), dtype)
    padded[: len(x)] = x
    panels = padded.reshape(-1, PANEL_OUTPUTS, x.shape[1]).swapaxes(1, 2)
    return np.ascontiguousarray(panels).view(np.uint8).reshape(*panels.shape[:2], -1)


def _by_row(data: Bytes, dtype: type[np.generic], num_rows: int) -> Float32Array:
    elements = np.ascontiguousarray(data).view(dtype)  # [panels, blocks, 16]
    rows = elements.swapaxes(1, 2).reshape(-1, elements.shape[1])
    return rows[:num_rows].astype(np.float32)


def _pack_values(blocks: Blocks) -> Bytes:
    num_rows, num_cols = blocks.shape
    num_panels = -(-num_rows // PANEL_OUTPUTS)
    padded = np.zeros((num_panels * PANEL_OUTPUTS, num_cols), np.uint8)
    padded[:num_rows] = blocks.values
    groups = padded.reshape(num_panels, PANEL_OUTPUTS, -1, _GROUPS, _GROUP_INPUTS)
    groups = groups.transpose(0, 2, 3, 1, 4)  # [panels, blocks, groups, outputs, inputs]
    if blocks.bits == 4:
        half = _GROUPS // 2
        groups = groups[:, :, :half] | groups[:, :, half:] << np.uint8(4)
    return groups.reshape(num_panels, num_cols // BLOCK_INPUTS, -1)


def _unpack_values(data: Bytes, bits: int) -> Bytes:
    """[panels * 16, K]."""
    groups = data.reshape(*data.shape[:2], -1, PANEL_OUTPUTS, _GROUP_INPUTS)
    if bits == 4:
        groups = np.concatenate([groups & 15, groups >> 4], axis=2)
    rows = groups.transpose(0, 3, 1, 2, 4)
    return rows.reshape(data.shape[0] * PANEL_OUTPUTS, -1)
