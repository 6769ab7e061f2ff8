"""API keys, other origins, administration: who may do what."""

from __future__ import annotations

import logging

import pytest

from helpers.live_server import LiveServer
from tokenmill.config.serve_args import ServeArgs
from tokenmill.entrypoints.http.auth import ApiKeys, api_keys
from tokenmill.entrypoints.http.errors import AuthenticationError
from tokenmill.errors import ConfigError

KEY = "sk-a-key-that-nobody-knows"


@pytest.fixture(scope="module")
def server():
    with LiveServer(api_key=["other", KEY], enable_admin=True, log_requests=True) as server:
        server.headers = {}
        yield server


def routes(server):
    """(method, path) of everything that is served, and the two pages."""
    found = [
        (method.upper(), path.replace("{model_id}", "fake/model").replace("{response_id}", "x"))
        for path, operations in server.app_description["paths"].items()
        for method in operations
    ]
    return [*found, ("GET", "/docs"), ("GET", "/openapi.json")]


@pytest.fixture(scope="module")
def all_routes(server):
    server.app_description = server.get("/openapi.json", authorization=f"Bearer {KEY}").json
    return routes(server)


OPEN = {"/health", "/ready", "/ping"}


def test_b125_everything_but_health_needs_a_key(server, all_routes):
    assert len(all_routes) > 12
    for method, path in all_routes:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": f"Bearer {KEY}x"},
            {"authorization": f"Bearer {KEY[:-1]}"},
            {"authorization": f"Basic {KEY}"},
            {"authorization": KEY},
            {"authorization": "Bearer "},
            {"x-api-key": "wrong"},
        ):
            reply = server.request(method, path, b"{}" if method == "POST" else None, headers)
            if path in OPEN:
                assert reply.status == 200, path
            else:
                assert reply.status == 401, path
                # Anthropic's errors have it among their details.
                error = reply.error.get("details", reply.error)
                assert error.get("code", error.get("error_code")) == "invalid_api_key"
                assert reply.headers["www-authenticate"] == "Bearer"


def test_b125_no_other_spelling_of_a_path_is_open(server):
    for path in (
        "//v1/models",
        "/v1//models",
        "/./v1/models",
        "/health/../v1/models",
        "/health/",
        "/HEALTH",
        "/V1/MODELS",
        "/v1/models/",
        "//health",
        "/health%2f",
        "/health;x",
        "/nothing",
        "/ping/x",
    ):
        for method in ("GET", "HEAD", "OPTIONS", "POST"):
            assert server.request(method, path).status == 401, (method, path)
    for method in ("HEAD", "OPTIONS"):
        assert server.request(method, "/v1/models").status == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {KEY} "},
        {"x-api-key": KEY},
        {"authorization": "Bearer ", "x-api-key": KEY},
        {"authorization": "Bearer other"},
        {"authorization": "Bearer wrong", "x-api-key": KEY},
        {"authorization": f"Bearer {KEY}", "x-api-key": "wrong"},
    ],
)
def test_keys_open(server, headers):
    assert server.get("/v1/models", **headers).status == 200


def test_keys_are_in_no_log_and_no_answer(server, caplog):
    caplog.set_level(logging.DEBUG)
    wrong = "sk-wrong-but-secret"
    replies = [
        server.get("/v1/models", authorization=f"Bearer {KEY}"),
        server.get("/v1/models", authorization=f"Bearer {wrong}"),
        server.post("/v1/completions", {"prompt": 5}, authorization=f"Bearer {KEY}"),
    ]
    for secret in (KEY, wrong):
        assert secret not in caplog.text
        assert all(secret not in reply.body.decode() for reply in replies)
        assert all(secret not in str(reply.headers) for reply in replies)


def test_prompts_are_in_no_log(server, caplog):
    caplog.set_level(logging.DEBUG)
    secret = "xyzzy plugh"
    headers = {"authorization": f"Bearer {KEY}"}
    for body in ({"prompt": secret}, {"prompt": secret, "temperature": 9}, {"prompt": [secret, 5]}):
        server.post("/v1/completions", body, **headers)
    server.post("/v1/chat/completions", {"messages": [{"role": "x", "content": secret}]}, **headers)
    assert "xyzzy" not in caplog.text


def test_keys_are_kept_as_digests_only():
    keys = ApiKeys([KEY])
    assert KEY not in str(vars(keys))
    name = keys.check([(b"x-api-key", KEY.encode())])
    assert name is not None
    assert KEY not in name
    with pytest.raises(AuthenticationError):
        keys.check([])
    assert ApiKeys([]).check([]) is None


def test_a_file_of_keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# for the team\none\n\n  two  \n")
    assert len(api_keys(ServeArgs(api_key_file=str(path), api_key=["three"]))) == 3
    path.write_text("# nobody\n")
    with pytest.raises(ConfigError, match="holds no key"):
        api_keys(ServeArgs(api_key_file=str(path)))
    with pytest.raises(ConfigError, match="No such file"):
        api_keys(ServeArgs(api_key_file=str(tmp_path / "missing")))


def test_b137_caches_of_keys_can_be_kept_apart():
    with LiveServer(api_key=["a", "b"], isolate_api_keys=True) as server:
        salts = []
        for key, salt in (("a", None), ("b", None), ("a", None), ("a", "s"), ("b", "s")):
            body = {"prompt": "One", "cache_salt": salt}
            assert server.post("/v1/completions", body, **{"x-api-key": key, "authorization": ""})
            salts.append(server.engine.calls[-1][3])
        assert salts[0] == salts[2]
        assert len(set(salts)) == 4


def test_administration_is_off_unless_switched_on(server):
    with LiveServer() as plain:
        reply = plain.post("/reset_prefix_cache", b"")
        assert (reply.status, reply.error["code"]) == (403, "admin_disabled")
        assert plain.engine.num_resets == 0
    headers = {"authorization": f"Bearer {KEY}"}
    assert server.request("POST", "/reset_prefix_cache", None, headers).status == 200
    assert server.engine.num_resets == 1
    server.engine.running.add("x")
    try:
        busy = server.request("POST", "/reset_prefix_cache", None, headers)
    finally:
        server.engine.running.clear()
    assert (busy.status, busy.error["code"]) == (409, "cache_busy")


def test_other_origins_are_not_let_in_unless_named():
    preflight = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    with LiveServer() as server:
        reply = server.request("OPTIONS", "/v1/completions", None, preflight)
        assert "access-control-allow-origin" not in reply.headers
        assert (
            "access-control-allow-origin"
            not in server.get("/v1/models", origin="https://a.example").headers
        )
    with LiveServer(allowed_origins=["https://a.example"], api_key=[KEY]) as server:
        server.headers = {}
        reply = server.request("OPTIONS", "/v1/completions", None, preflight)
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        other = server.request(
            "OPTIONS", "/v1/completions", None, {**preflight, "origin": "https://b.example"}
        )
        assert "access-control-allow-origin" not in other.headers
        assert server.get("/v1/models", origin="https://a.example").status == 401
        stream = server.post(
            "/v1/completions",
            {"prompt": "One", "stream": True},
            origin="https://a.example",
            authorization=f"Bearer {KEY}",
        )
        assert stream.headers["access-control-allow-origin"] == "https://a.example"
        assert stream.events[-1] == "[DONE]"


def test_the_server_listens_on_loopback_unless_told():
    assert ServeArgs().host == "127.0.0.1"
