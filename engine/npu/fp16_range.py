"""What a device that computes in fp16 does not hold, told by the size of numbers.

The HTP has no infinities and no NaN: in the emulator numbers beyond fp16 go on up to 131,008 and
stay there, and a NaN becomes 131,008. So an overflow is a finite row that goes in or comes out with
a number beyond fp16's largest, and rows that came in not finite (a sequence whose own keys are not)
have to be made NaN again. Knows arrays only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from engine.batch import Float32Array
from engine.errors import DeviceOverflow
from engine.kernels.rows_kernel import first_row_beyond

LARGEST = 65504.0

RowIndices = NDArray[np.intp]

_LARGEST_BITS = np.float32(LARGEST).view(np.uint32)
_NO_ROWS: RowIndices = np.empty(0, np.intp)


def rows_not_finite(inputs: Sequence[Float32Array], what: str) -> RowIndices:
    """Rows that are not finite in any of the inputs, each [R, …] float32.

    `what` is for the message. Raises DeviceOverflow for a row that is finite but too large.
    """
    if all(_first_beyond(array) < 0 for array in inputs):
        return _NO_ROWS
    finite = np.logical_and.reduce([np.isfinite(array).all(axis=1) for array in inputs])
    for array in inputs:
        large = finite & (np.abs(array) > LARGEST).any(axis=1)
        if large.any():
            overflow(f"row {large.argmax()} that goes into {what}")
    return np.flatnonzero(~finite)


def settle(outputs: Sequence[Float32Array], lost: RowIndices, what: str) -> None:
    """Makes NaN of the rows that came in not finite, in all outputs [R, …].

    Raises DeviceOverflow for any other row that holds a number beyond fp16.
    """
    for array in outputs:
        if len(lost):
            array[lost] = 0
        row = _first_beyond(array)
        if row >= 0:
            overflow(f"row {row} that comes out of {what}")
        if len(lost):
            array[lost] = np.nan


def overflow(what: str) -> NoReturn:
    raise DeviceOverflow(f"{what} has numbers beyond {LARGEST:,.0f}, which fp16 does not hold")


def _first_beyond(array: Float32Array) -> int:
    row: int = first_row_beyond(array, _LARGEST_BITS)
    return row
