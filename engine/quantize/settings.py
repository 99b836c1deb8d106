"""What the user asks of a quantization, and which blocks that means."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ImportFailed
from engine.quantize.blocks import BLOCK_SIZES, BlockFormat

INT8, INT4, INT4_AWQ, MIXED = "int8", "int4", "int4-awq", "mixed"
FORMATS = (INT8, INT4, INT4_AWQ, MIXED)

DEFAULT_MIXED_BITS = 6.0


@dataclass(frozen=True, slots=True)
class QuantizeSettings:
    """`weight_format` is one of `FORMATS`; `is_symmetric` concerns 4-bit blocks, 8-bit ones always
    are. `max_bits` bounds the mean bits per weight of the mixed format, scales and zero points
    included. `head_bits` is for the embedding and the output head: 8 or 4."""

    weight_format: str
    block_size: int = 32
    is_symmetric: bool = False
    max_bits: float = DEFAULT_MIXED_BITS
    head_bits: int = 8

    def check(self) -> None:
        """Raises ImportFailed naming what is wrong."""
        if self.weight_format not in FORMATS:
            raise ImportFailed(
                f"unknown format {self.weight_format!r}: use one of {', '.join(FORMATS)}"
            )
        if self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise ImportFailed(f"a block of {self.block_size} weights: use one of {sizes}")
        if self.head_bits not in (4, 8):
            raise ImportFailed(f"a head of {self.head_bits} bits: use 4 or 8")
        least = self.narrow.bits_per_weight
        if self.weight_format == MIXED and self.max_bits < least:
            raise ImportFailed(
                f"a budget of {self.max_bits} bits per weight: 4-bit blocks of {self.block_size} "
                f"already take {least:.2f} with their scales"
            )

    @property
    def narrow(self) -> BlockFormat:
        return BlockFormat(4, self.block_size, self.is_symmetric)

    @property
    def wide(self) -> BlockFormat:
        return BlockFormat(8, self.block_size, is_symmetric=True)

    @property
    def formats(self) -> tuple[BlockFormat, ...]:
        """The forms that every matrix is brought to, the one to prefer first."""
        if self.weight_format == MIXED:
            return self.narrow, self.wide
        return (self.wide,) if self.weight_format == INT8 else (self.narrow,)

    @property
    def is_activation_aware(self) -> bool:
        return self.weight_format in (INT4_AWQ, MIXED)
