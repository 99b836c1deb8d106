"""Where the set-up brings the reference, the parity tests do run."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="the set-up brings torch on Linux only")
@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_the_reference_is_installed(package: str) -> None:
    assert find_spec(package), f"{package} is missing: pip install --editable '.[test]'"
