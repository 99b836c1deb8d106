"""What clients and operators see of drafts, and how a draft model is configured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.bundle import Bundle
from engine.speculation.config import SpeculationConfig
from scheduler.messages import GenerationRequest, StepOutput, StepStats
from server.config import ConfigError, EngineSettings, ServerConfig, SpeculationSettings
from server.loadable_model import engine_spec
from server.metrics import Metrics
from tests.server.http_client import app_of, chat, complete
from tests.server.scripted_client import FakeEngine, FakeStream, saying


class DraftingEngine(FakeEngine):
    """Every step checks three drafts, of which one less than its tokens came true."""

    def generate(self, request: GenerationRequest):  # type: ignore[no-untyped-def]
        stream = super().generate(request)
        assert isinstance(stream, FakeStream)
        step = stream._step

        def with_drafts() -> StepOutput:
            output = step()
            accepted = max(0, len(output.new_token_ids) - 1)
            return replace(output, num_draft_tokens=3, num_accepted_tokens=accepted)

        stream._step = with_drafts  # type: ignore[method-assign]
        return stream


@pytest.mark.parametrize("n", [1, 2])
def test_usage_tells_how_many_drafts_stood(n: int) -> None:
    engine = DraftingEngine(saying("abcdefgh"), tokens_per_step=3)
    usage = chat(app_of(engine), n=n).json()["usage"]
    assert usage["completion_tokens"] == 9 * n
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 6 * n
    assert details["rejected_prediction_tokens"] == 3 * n


def test_without_drafts_the_counts_are_zero() -> None:
    usage = complete(app_of(FakeEngine(saying("ab")))).json()["usage"]
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0


def test_the_engine_knows_whether_somebody_asked_for_the_seed() -> None:
    engine = FakeEngine(saying("a"))
    for fields in ({}, {"seed": 0}, {"seed": 7}):
        chat(app_of(engine), **fields)
    assert [request.sampling.is_seeded for request in engine.requests] == [False, True, True]


def test_metrics_count_drafts() -> None:
    metrics = Metrics()
    metrics.observe_step("m", StepStats(total_draft_tokens=9, total_accepted_tokens=4))
    text = metrics.render().decode()
    assert 'hexlm:draft_tokens_total{model_name="m"} 9.0' in text
    assert 'hexlm:accepted_tokens_total{model_name="m"} 4.0' in text


def config_of(**speculation: object) -> ServerConfig:
    settings = SpeculationSettings(**speculation)  # type: ignore[arg-type]
    return ServerConfig(engine=EngineSettings(threads=1, kv_memory=1 << 20), speculation=settings)


def test_by_default_ngrams_are_looked_up_and_nothing_else() -> None:
    assert engine_spec(Path("model"), config_of()).speculation == SpeculationConfig("auto", 16)
    assert SpeculationConfig().looks_up_ngrams and not SpeculationConfig().uses_draft_model


def test_a_draft_model_is_found_by_its_path(tiny_bundle: Bundle) -> None:
    models = {"model": str(tiny_bundle.path)}
    spec = engine_spec(Path("model"), config_of(draft_models=models, max_draft_tokens=4))
    assert spec.speculation == SpeculationConfig("auto", 4, tiny_bundle.path)
    assert spec.speculation.uses_draft_model
    assert (
        engine_spec(Path("other"), config_of(draft_models=models)).speculation.draft_bundle is None
    )


def test_switched_off_is_off_whatever_is_configured(tiny_bundle: Bundle) -> None:
    models = {"model": str(tiny_bundle.path)}
    spec = engine_spec(Path("model"), config_of(method="off", draft_models=models))
    assert not spec.speculation.looks_up_ngrams and not spec.speculation.uses_draft_model


def test_the_draft_method_needs_a_draft_model() -> None:
    with pytest.raises(ConfigError, match="draft_models names none for model"):
        engine_spec(Path("model"), config_of(method="draft"))


def test_a_draft_model_that_is_not_there_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    models = {"model": str(tmp_path / "nowhere")}
    with pytest.raises(ConfigError, match="^speculation.draft_models: "):
        engine_spec(Path("model"), config_of(draft_models=models))
