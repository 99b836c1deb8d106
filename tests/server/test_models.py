"""The manager of models: names, loading, unloading, failures, and what it makes of a config."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from server.config import ConfigError, load_config
from server.engine_client import ClientPolicy
from server.engine_entry import run_engine
from server.engine_process import SpawnLauncher
from server.engine_state import EngineState
from server.errors import EngineUnavailable, UnknownModel
from server.loadable_model import aliases_of, engine_spec
from server.metrics import Metrics
from server.models import ModelManager, client_policy, http_settings
from tests.server.engine_scripts import (
    INFO,
    ThreadLauncher,
    expected_tokens,
    failing_engine,
    request,
    scripted_engine,
    silent_engine,
)
from tests.server.tiny_models import loadable

POLICY = ClientPolicy(max_num_seqs=4, max_queue=4)


def manager() -> ModelManager:
    return ModelManager(POLICY, Metrics())


def test_models_are_found_by_name_and_alias_and_the_first_is_the_default() -> None:
    async def main() -> None:
        models = manager()
        with pytest.raises(UnknownModel, match="Models served here: none"):
            models.get(None)
        one = models.load(loadable("one", ThreadLauncher(scripted_engine), ("uno",)))
        two = models.load(loadable("two", ThreadLauncher(scripted_engine)))
        assert models.get(None) is models.get("one") is models.get("uno") is one
        assert models.get("two") is two
        assert list(models.list()) == [one, two]
        with pytest.raises(UnknownModel, match="Models served here: one, two"):
            models.get("three")
        await models.stop()

    asyncio.run(main())


def test_two_models_cannot_share_a_name() -> None:
    async def main() -> None:
        models = manager()
        models.load(loadable("one", ThreadLauncher(scripted_engine), ("uno",)))
        with pytest.raises(ConfigError, match="another model is already called 'uno'"):
            models.load(loadable("two", ThreadLauncher(scripted_engine), ("uno",)))
        await models.stop()

    asyncio.run(main())


def test_a_model_that_fails_to_load_leaves_the_others_usable() -> None:
    async def main() -> None:
        models = manager()
        models.load(loadable("bad", ThreadLauncher(failing_engine)))
        good = models.load(loadable("good", ThreadLauncher(scripted_engine)))
        await models.wait_settled()
        assert models.failures() == {"bad": "the bundle is damaged; run `hexlm pull` again"}
        wanted = request("a", num_tokens=3)
        outputs = [output async for output in good.engine.generate(wanted)]
        assert [o.new_token_ids[0] for o in outputs] == expected_tokens(wanted)
        assert good.engine.info == INFO
        await models.stop()

    asyncio.run(main())


def test_unloading_ends_streams_and_the_engine_and_frees_the_name() -> None:
    async def main() -> None:
        models, launcher = manager(), ThreadLauncher(silent_engine)
        served = models.load(loadable("one", launcher))
        await models.wait_settled()
        stream = served.engine.generate(request("a"))
        await models.unload("one")
        outputs = [output async for output in stream]
        assert outputs[-1].error == "The model was unloaded; the answer is incomplete."
        assert not launcher.links[0][1].is_alive()
        assert list(models.list()) == []
        models.load(loadable("one", ThreadLauncher(scripted_engine)))
        await models.stop()

    asyncio.run(main())


def test_draining_reaches_every_model() -> None:
    async def main() -> None:
        models = manager()
        served = [models.load(loadable(n, ThreadLauncher(silent_engine))) for n in ("a", "b")]
        await models.wait_settled()
        await models.drain(0.1)
        assert [model.engine.state for model in served] == [EngineState.DRAINING] * 2
        with pytest.raises(EngineUnavailable, match="The model b is draining"):
            served[1].engine.generate(request("x"))
        await models.stop()

    asyncio.run(main())


def test_the_http_side_is_told_what_the_configuration_says() -> None:
    flags = {"host": "127.0.0.1", "api_keys": ["k"], "default_deadline_s": 9, "cors_origins": "*"}
    settings = http_settings(load_config(flags=flags))
    assert settings.api_keys == ("k",)
    assert settings.default_timeout_s == 9.0
    assert settings.cors_origins == ("*",)
    assert "localhost" in settings.trusted_hosts
    everywhere = http_settings(load_config(flags={"host": "0.0.0.0"}))
    assert (everywhere.trusted_hosts, everywhere.default_timeout_s) == ((), None)
    with pytest.raises(ConfigError, match="must not be empty"):
        http_settings(load_config(flags={"api_keys": [" "]}))


def test_the_engine_process_is_told_what_the_configuration_says() -> None:
    flags = {"threads": 3, "kv_memory": "1MiB", "max_model_len": 99, "aging_s": 4, "device": "cpu"}
    spec = engine_spec(Path("bundle"), load_config(flags=flags))
    assert (spec.num_threads, spec.kv_memory_bytes, spec.max_model_len) == (3, 1024**2, 99)
    assert (spec.aging_s, spec.device, spec.kv_format) == (4.0, "cpu", "auto")
    detected = engine_spec(Path("bundle"), load_config())
    assert detected.num_threads >= 1
    assert detected.kv_memory_bytes >= 64 * 1024**2


def test_an_engine_process_that_finds_no_bundle_fails_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        models = manager()
        spec = engine_spec(tmp_path, load_config(flags={"kv_memory": "1MiB"}))
        models.load(loadable("none", SpawnLauncher(partial(run_engine, spec=spec), "none")))
        await models.wait_settled()
        assert "is not a usable bundle" in models.failures()["none"]
        await models.stop()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_the_supervision_follows_the_configuration() -> None:
    flags = {"max_num_seqs": 2, "max_queue": 3, "stall_timeout_s": 7, "max_restarts": 1}
    policy = client_policy(load_config(flags=flags))
    assert (policy.max_num_seqs, policy.max_queue) == (2, 3)
    assert (policy.supervision.stall_timeout_s, policy.supervision.max_restarts) == (7.0, 1)


def test_aliases_come_from_the_catalog_and_the_configuration() -> None:
    configured = {"gpt-4o": "smollm2", "other": "elsewhere", "small": "smollm2-135m-instruct"}
    aliases = aliases_of("smollm2-135m-instruct", configured)
    assert aliases == ("smollm2-135m", "smollm2", "gpt-4o", "small")
    assert aliases_of("mine", {"m": "mine"}) == ("m",)
