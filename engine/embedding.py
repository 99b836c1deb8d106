"""Token ids to rows of the embedding matrix, dequantized from the mapped weights file.

Only the rows asked for are ever read; the head's graph shares the same bytes when they are tied.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.batch import Float32Array, Int32Array
from engine.errors import BundleError
from engine.export.weights_file import StoredMatrix, map_array
from engine.rows_kernel import unpack_rows


class Embedding:
    """[V, hidden], packed as `packing.PackedMatrix` says."""

    def __init__(self, weights_path: Path, matrix: StoredMatrix) -> None:
        """Raises BundleError when the file is too short."""
        try:
            self._data = np.asarray(map_array(weights_path, matrix.data), np.uint8)
            self._scales = np.asarray(map_array(weights_path, matrix.scales), np.float32)
        except (OSError, ValueError) as error:
            raise BundleError(f"{weights_path} cannot be mapped: {error}") from error
        self._bits = matrix.bits

    def lookup(self, token_ids: Int32Array, out: Float32Array) -> None:
        """out[T, hidden] = the rows of `token_ids` [T]."""
        unpack_rows(self._data, self._scales, self._bits, token_ids, out)
