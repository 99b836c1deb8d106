"""How kernels are compiled: without the interpreter's lock, and without reference counts.

They allocate nothing and keep no array. Left to itself numba counts references of slices with
atomic instructions, which took a quarter of the time of page writing and a seventh of that of
attention over short contexts.
"""

from __future__ import annotations

from typing import Any

import numba

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
compiled: Any = numba.njit(**_OPTIONS)
