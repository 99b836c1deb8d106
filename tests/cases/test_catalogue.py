"""Nothing of the catalogue is skipped silently."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.cases import coverage
from tests.cases.catalogue import catalogue

CASES = set(catalogue())


def test_every_case_is_covered_or_listed_with_its_reason() -> None:
    covered = set(coverage.covering_tests())
    assert CASES - covered - set(coverage.NOT_APPLICABLE) == set()
    assert covered & set(coverage.NOT_APPLICABLE) == set()


def test_every_part_that_is_missing_belongs_to_a_covered_case() -> None:
    assert set(coverage.PARTLY) <= set(coverage.covering_tests())
    assert all(len(reason) > 20 for reason in coverage.PARTLY.values())
    assert all(len(reason) > 20 for reason in coverage.NOT_APPLICABLE.values())


def test_every_name_in_the_tables_and_marks_is_a_case() -> None:
    named = set(coverage.ELSEWHERE) | set(coverage.marked()) | set(coverage.NOT_APPLICABLE)
    assert named - CASES == set()


@pytest.mark.parametrize(
    "test_id", sorted({t for tests in coverage.covering_tests().values() for t in tests})
)
def test_a_test_that_is_named_exists(test_id: str) -> None:
    path, _, function = test_id.partition("[")[0].partition("::")
    module = import_module(path.removesuffix(".py").replace("/", "."))
    assert callable(getattr(module, function))


def test_marks_are_read_from_decorators() -> None:
    tests = coverage.marked()["CC-01"]
    assert tests == (
        "tests/cases/test_engine.py::test_a_prefix_hit_gives_the_text_of_a_miss_at_every_border",
    )


def test_every_case_says_what_is_right() -> None:
    for case in catalogue().values():
        assert case.title and case.right and case.area
        assert case.basis in {"contract", "correctness", "choice"}
