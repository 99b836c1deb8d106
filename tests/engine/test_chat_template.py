"""Chat templates are found in every place where one is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ImportFailed
from engine.importers.chat_template import find_in_folder, find_in_metadata
from engine.importers.gguf_metadata import Metadata

NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"chat_template.jinja": "J"}, "J"),
        ({"chat_template.json": {"chat_template": "C"}}, "C"),
        ({"tokenizer_config.json": {"chat_template": "K"}}, "K"),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, "D"),
        ({"tokenizer_config.json": {"chat_template": NAMED[1:]}}, "T"),
        ({"tokenizer_config.json": {"chat_template": {"default": "D", "rag": "R"}}}, "D"),
        ({"tokenizer_config.json": {"chat_template": None}}, None),
        ({"tokenizer_config.json": {}}, None),
        ({"additional_chat_templates/default.jinja": "A"}, "A"),
        ({"additional_chat_templates/tool_use.jinja": "A"}, "A"),
        ({"chat_template.jinja": "J", "additional_chat_templates/tool_use.jinja": "A"}, "J"),
        ({"chat_template.jinja": "J", "tokenizer_config.json": {"chat_template": "K"}}, "J"),
        (
            {"chat_template.json": {"chat_template": "C"}, "tokenizer_config.json": {}},
            "C",
        ),
    ],
)
def test_a_folder(tmp_path: Path, files: dict[str, Any], expected: str | None) -> None:
    assert find_in_folder(write(tmp_path, files)) == expected


@pytest.mark.parametrize("value", [5, [1], [{"name": "default"}], {"default": 1}])
def test_a_template_that_is_no_text_is_refused(tmp_path: Path, value: Any) -> None:
    write(tmp_path, {"tokenizer_config.json": {"chat_template": value}})
    with pytest.raises(ImportFailed, match="neither a text nor a list of named templates"):
        find_in_folder(tmp_path)


def test_a_template_that_is_too_long_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template.jinja": "x" * (1 << 20) + "x"})
    with pytest.raises(ImportFailed, match="more than such a file can need"):
        find_in_folder(tmp_path)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, None),
        ({"tokenizer.chat_template": "G"}, "G"),
        ({"tokenizer.chat_template": "G", "tokenizer.chat_template.tool_use": "T"}, "G"),
        ({"tokenizer.chat_template.tool_use": "T"}, "T"),
        ({"tokenizer.chat_template.rag": "R", "tokenizer.chat_template.tool_use": "T"}, "T"),
    ],
)
def test_a_gguf(values: dict[str, str], expected: str | None) -> None:
    assert find_in_metadata(Metadata(Path("a.gguf"), values)) == expected
