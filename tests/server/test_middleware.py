from typing import Any

import httpx
import pytest

from server.http_settings import HttpSettings
from server.middleware import host_name
from tests.server.http_client import HI, app_of, chat, error_of, send
from tests.server.scripted_client import FakeEngine, saying

CHAT = "/v1/chat/completions"
PAGE = "http://localhost:5173"
KEYS = HttpSettings(api_keys=("first-key", "schlüssel"), cors_origins=(PAGE,))


def asked(
    settings: HttpSettings, headers: Any, engine: FakeEngine | None = None, **options: Any
) -> httpx.Response:
    app = app_of(engine or FakeEngine(saying("a")), settings)
    options = {"json": {"messages": HI}} | options
    return send(app, "POST", CHAT, headers=headers, **options)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "Bearer wrong",
        "Bearer first-keyx",
        "first-key",
        "Basic first-key",
        "Bearer",
        "Bearer ",
    ],
)
def test_a_missing_or_wrong_key_is_a_401_before_the_body_is_read(value: str | None) -> None:
    headers = {"authorization": value} if value else {}
    response = asked(KEYS, headers, json=None, content=b"{")
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert error_of(response)["code"] == "invalid_api_key"
    assert "first-key" not in response.text


@pytest.mark.parametrize("value", ["Bearer first-key", "bearer first-key", "Bearer schlüssel"])
def test_every_configured_key_opens(value: str) -> None:
    assert asked(KEYS, [(b"authorization", value.encode())]).status_code == 200


def test_an_empty_key_cannot_be_configured() -> None:
    with pytest.raises(ValueError, match="empty"):
        HttpSettings(api_keys=(" ",))


def test_probes_and_metrics_need_no_key_but_models_do() -> None:
    app = app_of(FakeEngine(saying("a")), KEYS)
    statuses = {
        path: send(app, "GET", path).status_code for path in ("/live", "/ready", "/metrics")
    }
    assert set(statuses.values()) == {200}
    assert send(app, "GET", "/v1/models").status_code == 401


def test_keys_have_prefix_caches_of_their_own_and_without_keys_all_share() -> None:
    engine = FakeEngine(saying("a"))
    for key in ("first-key", "schlüssel"):
        asked(KEYS, [(b"authorization", f"Bearer {key}".encode())], engine)
    asked(HttpSettings(), {}, engine)
    salts = [request.cache_salt for request in engine.requests]
    assert salts[2] == ""
    assert len(set(salts)) == 3
    assert not any("key" in salt for salt in salts)


def test_a_preflight_needs_no_key_and_allows_what_sdks_send() -> None:
    app = app_of(FakeEngine(saying("a")), KEYS)
    headers = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    response = send(app, "OPTIONS", CHAT, headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == PAGE
    assert "x-stainless-os" in response.headers["access-control-allow-headers"]
    other = send(app, "OPTIONS", CHAT, headers=headers | {"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def broken_engine() -> FakeEngine:
    def script(request: object) -> list[int]:
        raise RuntimeError("secret")

    return FakeEngine(script)


@pytest.mark.parametrize(
    ("options", "engine", "status"),
    [
        ({"content": b"{"}, None, 400),
        ({"json": {"messages": HI, "model": "x"}}, None, 404),
        ({"json": {"messages": HI, "user": "x" * 3000}}, None, 413),
        ({"json": {"messages": HI}}, broken_engine(), 500),
    ],
)
def test_errors_carry_cors_headers_and_an_id(
    options: Any, engine: FakeEngine | None, status: int
) -> None:
    settings = HttpSettings(cors_origins=(PAGE,), max_body_bytes=2000)
    response = asked(settings, {"origin": PAGE}, engine, **({"json": None} | options))
    assert response.status_code == status
    assert response.headers["access-control-allow-origin"] == PAGE
    assert response.headers["vary"] == "Origin"
    assert "retry-after" in response.headers["access-control-expose-headers"].lower()
    assert response.headers["x-request-id"].startswith("req_")
    assert "secret" not in error_of(response)["message"]


def test_a_401_carries_cors_headers_too() -> None:
    response = asked(KEYS, {"origin": PAGE})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (401, PAGE)


def test_the_clients_request_id_comes_back_if_it_is_sane() -> None:
    assert asked(HttpSettings(), {"x-request-id": "my-id"}).headers["x-request-id"] == "my-id"
    odd = asked(HttpSettings(), {"x-request-id": "a b" * 99}).headers["x-request-id"]
    assert odd.startswith("req_")


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/models", 200), ("/health", 200), ("/", 200), (CHAT, 405)]
)
def test_head_is_get_without_its_body(path: str, status: int) -> None:
    app = app_of(FakeEngine(saying("a")))
    head, get = send(app, "HEAD", path), send(app, "GET", path)
    assert (head.status_code, head.content) == (status, b"")
    assert head.headers["content-length"] == get.headers["content-length"]
    assert head.headers["content-type"] == get.headers["content-type"]


def test_head_needs_a_key_as_get_does() -> None:
    assert send(app_of(FakeEngine(saying("a")), KEYS), "HEAD", "/v1/models").status_code == 401


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/nope"), ("GET", CHAT), ("PUT", "/live")])
def test_the_frameworks_own_errors_have_openais_shape(method: str, path: str) -> None:
    response = send(app_of(FakeEngine(saying("a"))), method, path)
    assert response.status_code == (404 if "nope" in path else 405)
    assert error_of(response)["message"] == f"Invalid URL ({method} {path})"


LOOPBACK = HttpSettings(trusted_hosts=("localhost", "127.0.0.1", "[::1]"))


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 403)],
)
def test_a_rebound_host_name_is_refused(host: str, status: int) -> None:
    assert asked(LOOPBACK, {"host": host}).status_code == status


def test_a_page_of_another_site_may_not_drive_the_model_unless_allowed() -> None:
    headers = {"sec-fetch-site": "cross-site", "origin": "http://evil.example"}
    assert error_of(asked(LOOPBACK, headers))["code"] == "host_not_allowed"
    allowed = HttpSettings(
        trusted_hosts=LOOPBACK.trusted_hosts, cors_origins=("http://evil.example",)
    )
    assert asked(allowed, headers).status_code == 200


def test_a_host_name_is_read_without_its_port() -> None:
    names = [host_name(host) for host in ("A.b:80", "[::1]:80", "[::1]", "x")]
    assert names == ["a.b", "[::1]", "[::1]", "x"]


def test_a_client_without_any_of_these_headers_is_served() -> None:
    assert chat(app_of(FakeEngine(saying("a")), LOOPBACK)).status_code == 200
