"""How a model writes what is not plain text: its tool family, and whether it thinks aloud.

Taken from the configuration (`models.tool_parsers`, `models.reasoning_parsers`), else from the
model's entry in `configs/models/*.toml` (`tool_parser`, `reasoning_parser`), else from its chat
template by the rules in `tool_parsers/registry.py` and here: a template that mentions `<think>` or
`</think>` is a reasoning model's. Decided once, when a model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from server.reasoning import TAGS
from server.tool_parsers import registry

TOOL_PARSERS = registry.NAMES
REASONING_PARSERS = ("none", "think")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """`tool_parser` is a name of `registry.NAMES`."""

    tool_parser: str = registry.GENERIC
    reasons: bool = False


def output_format(
    template: str | None, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> OutputFormat:
    """Names that are given win over the rules.

    Raises:
        ValueError: a name is none of ours.
    """
    if tool_parser is not None and tool_parser not in registry.NAMES:
        raise ValueError(f"tool_parser must be one of {', '.join(registry.NAMES)}")
    if reasoning_parser is not None and reasoning_parser not in REASONING_PARSERS:
        raise ValueError(f"reasoning_parser must be one of {', '.join(REASONING_PARSERS)}")
    thinks = template is not None and any(tag in template for tag in TAGS)
    return OutputFormat(
        tool_parser=tool_parser or registry.name_for_template(template),
        reasons=thinks if reasoning_parser is None else reasoning_parser == "think",
    )
