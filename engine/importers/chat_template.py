"""Finds a model's chat template in every place where one is kept.

In a Hugging Face folder, the first of these that is there:

    chat_template.jinja, additional_chat_templates/<name>.jinja
    chat_template.json               {"chat_template": …}
    tokenizer_config.json            chat_template: a text, or a list of {"name", "template"}

In a GGUF: `tokenizer.chat_template`, and `tokenizer.chat_template.<name>` for named ones.

Of several named templates the one called `default` counts; one called `tool_use` is taken when it
is all there is. Does not read Jinja.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.errors import ImportFailed
from engine.importers.gguf_metadata import Metadata
from engine.importers.json_file import read_object, read_text_file

MAX_TEMPLATE_BYTES = 1 << 20
DEFAULT = "default"
FALLBACKS = ("tool_use",)
TEMPLATE_FILE = "chat_template.jinja"
ADDITIONAL_FOLDER = "additional_chat_templates"
GGUF_KEY = "tokenizer.chat_template"


def find_in_folder(folder: Path) -> str | None:
    """Raises ImportFailed for a file that cannot be read."""
    templates = _from_jinja_files(folder)
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        if not templates and path.exists():
            templates = named_templates(path, read_object(path).get("chat_template"))
    return choose(templates)


def find_in_metadata(metadata: Metadata) -> str | None:
    """Raises ImportFailed when a template is no text."""
    prefix = GGUF_KEY + "."
    templates = {
        key.removeprefix(prefix): metadata.string(key)
        for key in metadata.values
        if key.startswith(prefix)
    }
    if (text := metadata.optional_string(GGUF_KEY)) is not None:
        templates[DEFAULT] = text
    return choose(templates)


def named_templates(path: Path, value: object) -> dict[str, str]:
    """Name → template of a text, a list of named ones, or an object of them."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    items = value.items() if isinstance(value, dict) else _pairs(path, value)
    templates = {str(name): text for name, text in items if isinstance(text, str)}
    if len(templates) != len(items):
        raise _wrong(path)
    return templates


def _pairs(path: Path, value: object) -> list[tuple[object, object]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise _wrong(path)
    return [(item.get("name"), item.get("template")) for item in value]


def _wrong(path: Path) -> ImportFailed:
    return ImportFailed(f"{path}: chat_template is neither a text nor a list of named templates")


def choose(templates: Mapping[str, str]) -> str | None:
    """The default one, else the only one there is, else one of `FALLBACKS`."""
    if DEFAULT in templates:
        return templates[DEFAULT]
    if len(templates) == 1:
        return next(iter(templates.values()))
    return next((templates[name] for name in FALLBACKS if name in templates), None)


def _from_jinja_files(folder: Path) -> dict[str, str]:
    templates = {}
    if (path := folder / TEMPLATE_FILE).exists():
        templates[DEFAULT] = read_text_file(path, MAX_TEMPLATE_BYTES)
    if (additional := folder / ADDITIONAL_FOLDER).is_dir():
        for path in sorted(additional.glob("*.jinja"))[:64]:
            templates.setdefault(path.stem, read_text_file(path, MAX_TEMPLATE_BYTES))
    return templates
