"""How a bundle is spoken to: what the configuration says wins over what was found out."""

from __future__ import annotations

import pytest

from engine.bundle import Bundle
from server.cli.errors import CliError
from server.cli.serve import find_models
from server.config import ModelSettings, ServerConfig
from server.loadable_model import from_bundle
from server.output_format import OutputFormat


def config_with(bundle: Bundle, **models: object) -> ServerConfig:
    settings = ModelSettings(model=(str(bundle.path),), **models)  # type: ignore[arg-type]
    return ServerConfig(models=settings)


def test_parsers_are_found_out_and_the_schema_is_told(tiny_bundle: Bundle) -> None:
    model = from_bundle(tiny_bundle.path, config_with(tiny_bundle))
    assert model.output_format == OutputFormat("generic", reasons=False)
    assert model.schema_in_prompt


def test_the_configurations_parsers_win(tiny_bundle: Bundle) -> None:
    config = config_with(
        tiny_bundle,
        tool_parsers={tiny_bundle.name: "mistral"},
        reasoning_parsers={tiny_bundle.name: "think"},
        schema_in_prompt=False,
    )
    model = from_bundle(tiny_bundle.path, config)
    assert model.output_format == OutputFormat("mistral", reasons=True)
    assert not model.schema_in_prompt


@pytest.mark.parametrize("key", ["tool_parsers", "reasoning_parsers"])
def test_a_parser_of_a_model_that_is_not_served_is_an_error(tiny_bundle: Bundle, key: str) -> None:
    values = {"tool_parsers": "hermes", "reasoning_parsers": "think"}
    config = config_with(tiny_bundle, **{key: {"nobody": values[key]}})
    with pytest.raises(CliError, match=f"models.{key} names nobody.*names are {tiny_bundle.name}"):
        find_models(config)
