import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler.messages import Priority
from server.api_keys import ApiKey
from server.config import ConfigError, load_config, read_key_policies
from server.http_settings import HttpSettings
from server.models import http_settings
from tests.server.http_client import HI, app_of, error_of, send
from tests.server.scripted_client import FakeEngine, saying

PATH = "/v1/chat/completions"


def settings_of(*keys: ApiKey) -> HttpSettings:
    return HttpSettings(api_keys=("plain",), key_policies=keys)


def ask(
    app: Any, key: str, method: str = "POST", path: str = PATH, **fields: Any
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    body = {"messages": HI, **fields} if method == "POST" else None
    return send(app, method, path, headers=headers, json=body)


def test_a_key_over_its_requests_is_a_429_and_the_others_are_not() -> None:
    limited = ApiKey("limited-key", "app", requests_per_minute=2)
    app = app_of(FakeEngine(saying("a")), settings_of(limited))
    first = ask(app, "limited-key")
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert ask(app, "limited-key").status_code == 200
    refused = ask(app, "limited-key")
    assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert "limited-key" not in refused.text
    assert ask(app, "limited-key", "GET", "/v1/models").status_code == 200
    plain = ask(app, "plain")
    assert plain.status_code == 200
    assert not [name for name in plain.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize("stream", [True, False])
def test_prompt_and_answer_tokens_count(stream: bool) -> None:
    key = ApiKey("k", "app", tokens_per_minute=10_000)
    app = app_of(FakeEngine(saying("hello")), settings_of(key))
    answer = ask(
        app, "k", stream=stream, stream_options={"include_usage": True} if stream else None
    )
    used = ask(app, "plain").json()["usage"]["total_tokens"]
    assert answer.status_code == 200
    remaining = int(ask(app, "k", "GET", "/v1/models").headers["x-ratelimit-remaining-tokens"])
    # A bucket of 10,000 a minute gets 167 back each second.
    assert 10_000 - used <= remaining < 10_000


def test_a_key_that_has_overdrawn_its_tokens_waits() -> None:
    app = app_of(FakeEngine(saying("x" * 100)), settings_of(ApiKey("k", "app", None, None, 60)))
    assert ask(app, "k").status_code == 200
    refused = ask(app, "k")
    assert (refused.status_code, int(refused.headers["retry-after"]) > 30) == (429, True)
    assert "60 tokens per minute" in error_of(refused)["message"]


@pytest.mark.parametrize(
    ("key", "asked", "got"),
    [
        ("low", {}, Priority.LOW),
        ("low", {"priority": "high"}, Priority.LOW),
        ("low", {"service_tier": "priority"}, Priority.LOW),
        ("high", {}, Priority.HIGH),
        ("high", {"service_tier": "auto"}, Priority.HIGH),
        ("high", {"priority": 1}, Priority.LOW),
        ("plain", {}, Priority.NORMAL),
        ("plain", {"priority": "high"}, Priority.HIGH),
    ],
)
def test_requests_run_in_the_class_of_their_key_or_a_lower_one(
    key: str, asked: dict[str, Any], got: Priority
) -> None:
    engine = FakeEngine(saying("a"))
    keys = (ApiKey("low", "l", Priority.LOW), ApiKey("high", "h", Priority.HIGH))
    assert ask(app_of(engine, settings_of(*keys)), key, **asked).status_code == 200
    assert engine.requests[0].priority is got


def test_keys_never_share_prefix_blocks_and_clients_cannot_reach_another_keys() -> None:
    engine = FakeEngine(saying("a"))
    app = app_of(engine, settings_of(ApiKey("one", "1"), ApiKey("two", "2")))
    ask(app, "one")
    first = engine.requests[-1].cache_salt
    for salt in (None, first, first.rstrip(":"), ""):
        ask(app, "two", cache_salt=salt)
        assert not engine.requests[-1].cache_salt.startswith(first)
    ask(app, "one")
    assert engine.requests[-1].cache_salt == first != ""
    everybody = FakeEngine(saying("a"))
    ask(app_of(everybody), "none")
    assert everybody.requests[-1].cache_salt == ""


def test_a_key_shows_in_no_repr_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    settings = settings_of(ApiKey("sk-secret", "app", requests_per_minute=1))
    app = app_of(FakeEngine(saying("a")), settings)
    for key in ("sk-secret", "sk-secret", "sk-secre"):
        assert "sk-secret" not in ask(app, key).text
    assert "sk-secret" not in repr(settings) + caplog.text
    assert "plain" not in repr(settings)


def config_of(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "server.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def test_keys_are_configured_one_table_each(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("# a comment\nsk-b\n", encoding="utf-8")
    config = config_of(
        tmp_path,
        "[[api_keys]]\nname = 'a'\nkey = 'sk-a'\npriority = 'low'\nrequests_per_minute = 6\n"
        f"[[api_keys]]\nname = 'b'\nkey_file = '{file.as_posix()}'\ntokens_per_minute = 9\n",
    )
    keys = http_settings(config).key_policies
    assert keys == (ApiKey("sk-a", "a", Priority.LOW, 6), ApiKey("sk-b", "b", None, None, 9))
    assert config.has_keys
    assert not load_config().has_keys


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[api_keys]]\nkey = 'sk-x'", r"api_keys\[0\].name in .* must be a name of its own"),
        ("[[api_keys]]\nname = 'a'", "needs either key or key_file"),
        ("[[api_keys]]\nname = 'a'\nkey = 'sk-x'\nkey_file = 'f'", "needs either"),
        ("[[api_keys]]\nname = 'a'\nkey = 5", r"\.key in .* must be a string$"),
        ("[[api_keys]]\nname = 'a'\nkey = 'sk-x'\nrpm = 5", "unknown key 'rpm'"),
        ("[[api_keys]]\nname = 'a'\nkey = 'sk-x'\npriority = 'top'", "high, normal, low"),
        ("[[api_keys]]\nname = 'a'\nkey = 'sk-x'\nrequests_per_minute = -1", "at least 0"),
        ("api_keys = ['sk-x']", r"write \[\[api_keys\]\]"),
        ("[api_keys]\nname = 'a'", r"write \[\[api_keys\]\]"),
    ],
)
def test_a_wrong_table_is_named_without_its_secret(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        config_of(tmp_path, text)
    assert "sk-x" not in str(error.value)


def test_a_key_is_given_once_and_its_file_holds_one(tmp_path: Path) -> None:
    twice = "".join(f"[[api_keys]]\nname = '{name}'\nkey = 'sk-x'\n" for name in "ab")
    with pytest.raises(ConfigError, match="'a' is given twice"):
        read_key_policies(config_of(tmp_path, twice))
    plain = "[server]\napi_keys = 'sk-x'\n[[api_keys]]\nname = 'a'\nkey = 'sk-x'\n"
    with pytest.raises(ConfigError, match="'a' is given twice"):
        read_key_policies(config_of(tmp_path, plain))
    file = tmp_path / "keys"
    file.write_text("sk-1\nsk-2\n", encoding="utf-8")
    both = f"[[api_keys]]\nname = 'a'\nkey_file = '{file.as_posix()}'\n"
    with pytest.raises(ConfigError, match="holds 2 keys"):
        read_key_policies(config_of(tmp_path, both))
