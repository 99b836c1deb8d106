"""Counting what suites print; no suite is run here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.clients import run_suites
from tests.clients.run_suites import Outcome, Suite, chosen_suites, read_outcome, run_suite

X = Suite("x", ("x.py",), model_judged=("wit",))


def test_passed_and_failed_are_counted_and_failures_keep_their_lines() -> None:
    output = (
        "PASS a (0.1s)\nFAIL b (0.2s) line 3: Error: no\nsuite: 1 skipped\n1 passed, 1 failed\n"
    )
    expected = Outcome("x", 1, 1, ("FAIL b (0.2s) line 3: Error: no",))
    assert read_outcome(X, output, 1) == expected


def test_a_suite_without_failures_has_no_reasons() -> None:
    assert read_outcome(X, "3 passed, 0 failed\n", 0) == Outcome("x", 3, 0, ())


@pytest.mark.parametrize("output", ["", "Traceback\nImportError: no module\n"])
def test_a_suite_that_does_not_count_has_failed(output: str) -> None:
    outcome = read_outcome(X, output, 3)
    assert (outcome.passed, outcome.failed) == (0, 1)
    assert outcome.reasons[0] == "no count, exit code 3"
    assert outcome.reasons[1:] == tuple(output.splitlines())


def test_a_bad_end_after_a_good_count_is_a_failure() -> None:
    assert read_outcome(X, "3 passed, 0 failed\n", -1).failed == 1


def test_failures_of_the_model_are_counted_apart() -> None:
    output = "FAIL a: no wit\nFAIL b: no\n5 passed, 2 failed\n"
    outcome = read_outcome(X, output, 1)
    assert (outcome.passed, outcome.failed, outcome.model_judged) == (5, 1, 1)


def test_an_unknown_suite_lists_the_known() -> None:
    with pytest.raises(SystemExit, match="no suite nope; there are: wire, openai-python"):
        chosen_suites(["wire", "nope"])
    assert [suite.name for suite in chosen_suites(["dify"])] == ["dify"]
    assert chosen_suites([]) == list(run_suites.SUITES)


def test_a_missing_folder_is_one_line_that_says_what_to_give(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_suites", "--clients", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="CLIENTS=<folder>"):
        run_suites.main()


def test_a_suite_is_told_where_the_server_is_and_what_it_claims(tmp_path: Path) -> None:
    script = (
        "import os\nprint(os.environ['BASE_URL'], os.environ['CAPS'])\nprint('2 passed, 0 failed')"
    )
    (tmp_path / "some.py").write_text(script)
    outcome = run_suite(Suite("some", ("some.py",)), tmp_path, "http://here/v1", tmp_path, 20)
    assert outcome == Outcome("some", 2, 0, ())
    told = (tmp_path / "some.log").read_text()
    assert told.startswith(f"http://here/v1 {run_suites.CAPABILITIES}")


def test_a_suite_that_hangs_is_ended_and_has_failed(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text("import time\ntime.sleep(60)")
    outcome = run_suite(Suite("some", ("some.py",)), tmp_path, "http://here/v1", tmp_path, 0.5)
    assert (outcome.failed, outcome.reasons) == (1, ("no count, exit code -1",))
