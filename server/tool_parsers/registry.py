"""Tool families by name, and the rule that gives a model its family.

A model's entry in `configs/models/*.toml` names its family (`tool_parser`). A model without an
entry gets one from the text of its chat template, once, when it is loaded: the first line of
`_BY_TEMPLATE` whose text stands in the template; else `hermes`. A model whose template knows no
tools is taught the `generic` format by our own prompt (`tool_prompt.py`), whatever its entry says;
only the configuration (`models.tool_parsers`) wins over that.
Families are imported when they are asked for.
"""

from __future__ import annotations

from importlib import import_module

from server.tool_parsers.family import ToolFamily

DEFAULT = "hermes"
GENERIC = "generic"
NAMES = (GENERIC, DEFAULT, "llama3_json", "mistral", "pythonic", "qwen3_coder")

_BY_TEMPLATE = (
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("Environment: ipython", "llama3_json"),
)


def find_family(name: str) -> ToolFamily:
    """Raises KeyError for a name that is not in NAMES."""
    if name not in NAMES:
        raise KeyError(name)
    if name == GENERIC:
        family: ToolFamily = import_module("server.tool_parsers.hermes").GENERIC
    else:
        family = import_module(f"server.tool_parsers.{name}").FAMILY
    return family


def name_for_template(template: str | None) -> str:
    """The family of a model that says nothing else."""
    for text, name in _BY_TEMPLATE:
        if template is not None and text in template:
            return name
    return DEFAULT
