"""The rules of the source tree, read with `ast`: imports point one way and names say something."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("server", "scheduler", "engine")
FORBIDDEN = {"engine": {"scheduler", "server"}, "scheduler": {"server"}, "server": set[str]()}

ONLY_IN_SERVER = ("asyncio", "fastapi", "pydantic", "jinja2", "tokenizers")
ALSO_ALLOWED = {"tokenizers": ("engine/importers/",)}
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Full names of all imported modules, also of imports inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield node.module or ""


def imported_packages(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {name.partition(".")[0] for name in imported_names(tree)}


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_go_from_server_to_scheduler_to_engine_and_never_back(path: Path) -> None:
    package = relative(path).partition("/")[0]
    assert not imported_packages(path) & (FORBIDDEN[package] | {"tests"})


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_text_and_http_libraries_stay_in_the_server(path: Path) -> None:
    if relative(path).startswith("server/"):
        return
    imported = imported_packages(path)
    for library in ONLY_IN_SERVER:
        if not relative(path).startswith(ALSO_ALLOWED.get(library, ())):
            assert library not in imported


def test_only_the_session_modules_import_onnxruntime() -> None:
    libraries = {"onnxruntime", "onnxruntime_qnn"}
    importers = {relative(path) for path in MODULES if imported_packages(path) & libraries}
    assert importers <= {"engine/session.py", "engine/npu/qnn_session.py"}


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_every_module_that_has_code_opens_with_a_docstring(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree) or not tree.body


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_no_module_or_package_is_named_after_nothing(path: Path) -> None:
    nameless = {"util", "utils", "common", "helpers", "misc"}
    assert not nameless & {part.removesuffix(".py") for part in path.relative_to(ROOT).parts}


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_nothing_prints(path: Path) -> None:
    calls = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert calls == []


def test_the_rules_see_imports_inside_functions() -> None:
    tree = ast.parse("def f():\n    import server.app\n    from engine import batch\n")
    assert set(imported_names(tree)) == {"server.app", "engine"}
