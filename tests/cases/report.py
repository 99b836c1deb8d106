"""The case report: area, cases, how many their tests proved, how many do not apply.

    python -m tests.cases.report [--no-model]

Runs every test that a case names; a case has passed when all of them have. `--no-model` leaves
the tests on the real model out. Ends with 1 if a case failed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import pytest
from rich.console import Console
from rich.table import Table

from tests.cases.catalogue import catalogue
from tests.cases.coverage import NOT_APPLICABLE, PARTLY, covering_tests

_VERDICTS = ("passed", "failed", "not run", "not applicable")


class Results:
    """A pytest plugin: what became of every test, by its id without parameters, and of every
    variant by its whole id."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            for name in {report.nodeid, report.nodeid.partition("[")[0]}:
                self.outcomes[name][report.outcome] += 1

    def verdict(self, tests: Iterable[str]) -> str:
        """ "passed", "failed", or "not run" if all of the tests were left out."""
        ran = [self.outcomes[test] for test in tests if self.outcomes.get(test)]
        if not ran:
            return "not run"
        return "failed" if any(counts["failed"] for counts in ran) else "passed"


def run(with_model: bool) -> Results:
    results = Results()
    ids = {test for tests in covering_tests().values() for test in tests}
    files = sorted({test.partition("::")[0] for test in ids})
    markers = "not device and not npu" + ("" if with_model else " and not model")
    functions = {test.partition("::")[2].partition("[")[0] for test in ids}
    chosen = _Only(functions)
    pytest.main(["-q", "--no-header", "-m", markers, *files], plugins=[results, chosen])
    return results


class _Only:
    """A pytest plugin: of the files' tests, those whose function is named by a case."""

    def __init__(self, functions: set[str]) -> None:
        self._functions = functions

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        items[:] = [item for item in items if item.name.partition("[")[0] in self._functions]


def show(results: Results, console: Console) -> bool:
    """Print the tables; whether no case failed."""
    covering = covering_tests()
    verdicts = {
        case_id: "not applicable"
        if case_id in NOT_APPLICABLE
        else results.verdict(covering.get(case_id, ()))
        for case_id in catalogue()
    }
    console.print(_table(verdicts))
    for title, reasons in (("not applicable", NOT_APPLICABLE), ("in part", PARTLY)):
        for case_id, reason in reasons.items():
            console.print(f"{title}: {case_id} {catalogue()[case_id].title}: {reason}")
    failed = [case_id for case_id, verdict in verdicts.items() if verdict == "failed"]
    for case_id in failed:
        console.print(f"FAILED: {case_id} {catalogue()[case_id].title}")
    return not failed


def _table(verdicts: Mapping[str, str]) -> Table:
    """A line per area; the passed ones include those that were proved in part."""
    table = Table("area", "cases", *_VERDICTS, "in part")
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for case_id, verdict in verdicts.items():
        for name in (catalogue()[case_id].area, "all"):
            rows[name].update(["cases", verdict])
            rows[name]["in part"] += case_id in PARTLY
    rows["all"] = rows.pop("all")
    for name, counts in rows.items():
        columns = ("cases", *_VERDICTS, "in part")
        table.add_row(name, *(str(counts[column]) for column in columns))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the tests of all cases and count them.")
    parser.add_argument("--no-model", action="store_true", help="leave the real model out")
    options = parser.parse_args()
    results = run(with_model=not options.no_model)
    sys.exit(0 if show(results, Console(width=140, highlight=False)) else 1)


if __name__ == "__main__":
    main()
