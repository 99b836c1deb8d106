from __future__ import annotations

import pytest

from server.model_catalog import read_catalog
from server.output_format import OutputFormat, output_format


@pytest.mark.parametrize(
    ("template", "reasons"),
    [
        ("{{ '<think>\\n' }}", True),
        ("{{ content.split('</think>')[-1] }}", True),
        ("{{ content }}", False),
        (None, False),
    ],
)
def test_a_template_with_thought_tags_is_a_reasoning_models(
    template: str | None, reasons: bool
) -> None:
    assert output_format(template) == OutputFormat("hermes", reasons)


def test_names_that_are_given_win() -> None:
    assert output_format("<think>", "pythonic", "none") == OutputFormat("pythonic", False)
    assert output_format("", None, "think") == OutputFormat("hermes", True)


@pytest.mark.parametrize("names", [("x", None), (None, "x")])
def test_an_unknown_name_is_an_error(names: tuple[str | None, str | None]) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        output_format("", *names)


def test_every_registered_model_has_names_that_exist() -> None:
    for model in read_catalog():
        output_format(None, model.tool_parser, model.reasoning_parser)
