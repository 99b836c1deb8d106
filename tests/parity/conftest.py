"""Says loudly when the reference is missing: the set-up brings torch on Linux only."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

HAS_REFERENCE = find_spec("torch") is not None and find_spec("transformers") is not None
collect_ignore = [] if HAS_REFERENCE else ["test_parity.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not HAS_REFERENCE:
        terminalreporter.section("parity with transformers NOT tested", red=True)
        terminalreporter.write_line("torch or transformers is missing: pip install torch")
