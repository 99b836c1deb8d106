"""Token ids to rows of the embedding matrix, dequantized from the mapped weights file.

Only the rows asked for are ever read; the head's graph shares the same bytes when they are tied.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.batch import Float32Array, Int32Array
from engine.errors import BundleError
from engine.export.weights_file import StoredArray, StoredMatrix, map_array
from engine.kernels.rows_kernel import unpack_rows


class Embedding:
    """[V, hidden], packed as `packing.PackedMatrix` says. Every row is multiplied by `scale`."""

    def __init__(self, weights_path: Path, matrix: StoredMatrix, scale: float) -> None:
        """Raises BundleError when the file is too short."""

        def mapped(array: StoredArray | None) -> np.ndarray | None:
            return None if array is None else np.asarray(map_array(weights_path, array))

        try:
            self._data = np.asarray(map_array(weights_path, matrix.data))
            self._scales = mapped(matrix.scales)
            zero_points = mapped(matrix.zero_points)
        except (OSError, ValueError) as error:
            raise BundleError(f"{weights_path} cannot be mapped: {error}") from error
        self._zero_points = np.zeros((1, 0), np.uint8) if zero_points is None else zero_points
        self._bits = matrix.bits
        self._scale = np.float32(scale)

    def lookup(self, token_ids: Int32Array, out: Float32Array) -> None:
        """out[T, hidden] = the scaled rows of `token_ids` [T]."""
        if self._scales is None:
            out[:] = self._data[:, token_ids].T
        else:
            unpack_rows(self._data, self._scales, self._zero_points, self._bits, token_ids, out)
        if self._scale != 1:
            out *= self._scale
