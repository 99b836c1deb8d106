"""Linear layers as AWQ, GPTQ and compressed-tensors pack them, read row by row and exactly.

Everything is packed into 32-bit words, a layer `base` has N outputs and K inputs in G groups:

    AWQ gemm    base.qweight [K, N/8]  base.qzeros [G, N/8]  base.scales [G, N]; eight
                neighbouring outputs share a word in the order 0 2 4 6 1 3 5 7
    AWQ gemv    base.qweight [N, K/8]  base.qzeros [N, W/8]  base.scales [N, W], W >= G
    GPTQ        base.qweight [K/p, N]  base.qzeros [G, N/p]  base.scales [G, N]  base.g_idx [K],
                p values a word; the first version of the format stores zeros less one
    compressed  base.weight_packed [N, K/p]  base.weight_scale [N, G]
                base.weight_zero_point [N/p, G]  base.weight_g_idx [K]

Sources: AutoAWQ's `modules/linear`, AutoGPTQ's and GPTQModel's `qlinear`, compressed-tensors'
`pack_quantized`. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.errors import ImportFailed
from engine.importers.grouped_weights import GroupedWeights
from engine.importers.packed_words import unpack_words
from engine.importers.quantization import Quantization
from engine.importers.tensor_store import StoredTensor, TensorStore

Number = TypeVar("Number", bound=np.generic)

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which place of a word holds output 0, 1, … of its eight."""

SUFFIXES = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": (
        "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
    ),
}  # fmt: skip
OPTIONAL = frozenset({"g_idx", "weight_shape", "weight_zero_point", "weight_g_idx"})


def is_quantized(store: TensorStore, base: str) -> bool:
    """Whether the layer `base` is packed; those that were left alone have a plain weight."""
    return f"{base}.qweight" in store or f"{base}.weight_packed" in store


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """Checked on construction: every tensor is there and has the shape the others ask for."""

    store: TensorStore
    base: str
    quantization: Quantization
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        """Raises ImportFailed naming the tensor that is missing or does not fit."""
        expected = self._expected_shapes()
        for suffix in SUFFIXES[self.quantization.method]:
            if suffix in OPTIONAL and self.name_of(suffix) not in self.store:
                continue
            tensor = self.tensor(suffix)
            if suffix in expected and tensor.shape != expected[suffix]:
                raise self._misfit(suffix, f"the shape {list(expected[suffix])}")
        if not self.quantization.is_symmetric and "weight_zero_point" in expected:
            self.tensor("weight_zero_point")

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self.name_of(suffix) for suffix in SUFFIXES[self.quantization.method])

    @property
    def num_groups(self) -> int:
        size = self.quantization.group_size
        return -(-self.shape[1] // size) if size else 1

    def read(self, start: int, stop: int) -> GroupedWeights:
        """Rows start..stop. Raises ImportFailed for values that cannot be."""
        match self.quantization.method, self.quantization.packing:
            case "awq", "gemm":
                return self._awq_gemm(start, stop)
            case "awq", _:
                return self._awq_gemv(start, stop)
            case "gptq", _:
                return self._gptq(start, stop)
        return self._compressed(start, stop)

    def name_of(self, suffix: str) -> str:
        return f"{self.base}.{suffix}"

    def tensor(self, suffix: str) -> StoredTensor:
        return self.store.get(self.name_of(suffix))

    def _awq_gemm(self, start: int, stop: int) -> GroupedWeights:
        def unpacked(suffix: str) -> NDArray[np.uint8]:
            """[rows, K or G]: whole words, put in order, and cut to the rows."""
            words = self._words(suffix)[:, start // 8 : -(-stop // 8)]
            values = unpack_words(words, 4).reshape(len(words), -1, 8)[:, :, AWQ_PLACES]
            return _turned(values.reshape(len(words), -1)[:, start % 8 :][:, : stop - start])

        scales = _turned(self._scales("scales")[:, start:stop])
        return self._grouped(unpacked("qweight"), scales, unpacked("qzeros"), self._plain_groups())

    def _awq_gemv(self, start: int, stop: int) -> GroupedWeights:
        values = unpack_words(self._words("qweight")[start:stop], 4)
        zeros = unpack_words(self._words("qzeros")[start:stop], 4)[:, : self.num_groups]
        scales = self._scales("scales", start, stop)[:, : self.num_groups]
        return self._grouped(values, scales, zeros, self._plain_groups())

    def _gptq(self, start: int, stop: int) -> GroupedWeights:
        bits = self.quantization.bits
        per_word = 32 // bits
        values = unpack_words(_turned(self._words("qweight")[:, start:stop]), bits)
        words = self._words("qzeros")[:, start // per_word : -(-stop // per_word)]
        stored = unpack_words(words, bits)[:, start % per_word :][:, : stop - start]
        zeros = _turned(stored).astype(np.int16) + self.quantization.zero_offset
        if zeros.max(initial=0) > 255:
            raise self._misfit("qzeros", "zeros up to 255")
        scales = _turned(self._scales("scales")[:, start:stop])
        return self._grouped(values, scales, zeros.astype(np.uint8), self._group_index("g_idx"))

    def _compressed(self, start: int, stop: int) -> GroupedWeights:
        bits = self.quantization.bits
        values = unpack_words(self._words("weight_packed")[start:stop], bits)[:, : self.shape[1]]
        scales = self._scales("weight_scale", start, stop)
        if self.quantization.is_symmetric:
            zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
        else:
            per_word = 32 // bits
            words = self._words("weight_zero_point")[start // per_word : -(-stop // per_word)]
            unpacked = unpack_words(_turned(words), bits)
            zeros = _turned(unpacked[:, start % per_word :][:, : stop - start])
        return self._grouped(values, scales, zeros, self._group_index("weight_g_idx"))

    def _grouped(
        self,
        values: NDArray[np.uint8],
        scales: NDArray[np.float32],
        zeros: NDArray[np.uint8],
        group_of: NDArray[np.intp],
    ) -> GroupedWeights:
        return GroupedWeights(self.quantization.bits, values, scales, zeros, group_of)

    def _words(self, suffix: str) -> NDArray[np.integer]:
        tensor = self.tensor(suffix)
        if tensor.entry.dtype not in ("I32", "U32"):
            raise self._misfit(suffix, "32-bit integers")
        return tensor.integers()

    def _scales(self, suffix: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        tensor = self.tensor(suffix)
        return tensor.file.read_rows(tensor.entry, start, tensor.shape[0] if stop is None else stop)

    def _plain_groups(self) -> NDArray[np.intp]:
        size = self.quantization.group_size
        return np.arange(self.shape[1]) // size if size else np.zeros(self.shape[1], np.intp)

    def _group_index(self, suffix: str) -> NDArray[np.intp]:
        """[K]. Without a table, or with one of no use (all -1), inputs are grouped in order."""
        if self.name_of(suffix) not in self.store:
            return self._plain_groups()
        groups = np.array(self.tensor(suffix).integers(), np.intp)
        if (groups == -1).all():
            return self._plain_groups()
        if groups.min(initial=0) < 0 or groups.max(initial=0) >= self.num_groups:
            raise self._misfit(suffix, f"groups from 0 to {self.num_groups - 1}")
        return groups

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        num_rows, num_cols = self.shape
        groups, per_word = self.num_groups, 32 // self.quantization.bits
        row_words, col_words = -(-num_rows // per_word), -(-num_cols // per_word)
        if self.quantization.method == "gptq":
            return {
                "qweight": (col_words, num_rows),
                "qzeros": (groups, row_words),
                "scales": (groups, num_rows),
                "g_idx": (num_cols,),
            }
        if self.quantization.method == "compressed-tensors":
            return {
                "weight_packed": (num_rows, col_words),
                "weight_scale": (num_rows, groups),
                "weight_zero_point": (row_words, groups),
                "weight_g_idx": (num_cols,),
            }
        if self.quantization.packing == "gemv":
            width = self._gemv_width()
            return {
                "qweight": (num_rows, col_words),
                "qzeros": (num_rows, width),
                "scales": (num_rows, 8 * width),
            }
        return {
            "qweight": (num_cols, row_words),
            "qzeros": (groups, row_words),
            "scales": (groups, num_rows),
        }

    def _gemv_width(self) -> int:
        """Words of zeros in a row: at least those of the groups; how many more is padding."""
        shape = self.tensor("qzeros").shape
        least = -(-self.num_groups // 8)
        return shape[1] if len(shape) == 2 and shape[1] >= least else least

    def _misfit(self, suffix: str, expected: str) -> ImportFailed:
        tensor = self.tensor(suffix)
        return ImportFailed(
            f"{tensor.file.path}: tensor {tensor.entry.name!r} ({tensor.entry.dtype}, "
            f"{list(tensor.shape)}) does not fit a layer of {list(self.shape)} in "
            f"{self.quantization}: expected {expected}"
        )


def _turned(values: NDArray[Number]) -> NDArray[Number]:
    return np.ascontiguousarray(values.T)
