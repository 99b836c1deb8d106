"""What a native library raises or panics with becomes one line; what is not its fault passes."""

from __future__ import annotations

import pytest
from tokenizers import normalizers

from engine.errors import ImportFailed
from engine.importers.native_calls import refusing


class PanicException(BaseException):
    """As pyo3's is called, which nobody can import."""


@pytest.mark.parametrize("error", [ValueError("a\n b"), PanicException("a\n b")])
def test_errors_and_panics_become_one_line(error: BaseException) -> None:
    with (
        pytest.raises(ImportFailed, match=r"^x is no y: a b; download it again$"),
        refusing("x is no y"),
    ):
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ImportFailed("said already")])
def test_everything_else_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, refusing("x is no y"):
        raise error
    assert caught.value is error


def test_a_real_refusal_of_the_library() -> None:
    with pytest.raises(ImportFailed, match="x is no charsmap"), refusing("x is no charsmap"):
        normalizers.Precompiled(b"\xff\xff\xff\x7frubbish")
