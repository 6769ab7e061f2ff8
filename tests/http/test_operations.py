"""Sleeping, waking up and other weights over HTTP, in front of an engine that is a script."""

from __future__ import annotations

import pytest

from helpers.live_server import LiveServer
from tokenmill.contracts.operations import SCHEDULING, TAGS, Sleep, UpdateWeights, WakeUp
from tokenmill.errors import CheckpointError

ADMIN = {"enable_admin": True}
ROUTES = [
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/update_weights"),
    ("GET", "/is_sleeping"),
    ("GET", "/is_paused"),
    ("GET", "/get_weight_version"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    (root / "step-1").mkdir()
    with LiveServer(**ADMIN, weights_root=str(root)) as made:
        made.weights = root
        yield made


@pytest.fixture(autouse=True)
def forget(server):
    server.engine.operations.__init__()


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_they_are_off_unless_switched_on(method, path):
    with LiveServer() as plain:
        reply = plain.request(method, path, b"{}" if method == "POST" else None)
        assert (reply.status, reply.error["code"]) == (403, "admin_disabled")
        assert plain.engine.operations.asked == []


@pytest.mark.parametrize(
    ("target", "operation"),
    [
        ("/sleep", Sleep(1, "abort")),
        ("/sleep?level=2&mode=keep", Sleep(2, "keep")),
        ("/wake_up", WakeUp(TAGS)),
        ("/wake_up?tags=weights", WakeUp(("weights",))),
        ("/wake_up?tags=weights&tags=kv_cache", WakeUp(("weights", "kv_cache"))),
        ("/pause", Sleep(0, "abort", clear_cache=True)),
        ("/pause?mode=wait&clear_cache=false", Sleep(0, "wait")),
        ("/resume", WakeUp((SCHEDULING,))),
    ],
)
def test_parameters_of_the_url_say_what_is_done(server, target, operation):
    assert server.post(target, b"").status == 200
    assert server.engine.operations.asked == [operation]


@pytest.mark.parametrize(
    ("target", "parameter"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?level=one", "level"),
        ("/sleep?mode=later", "mode"),
        ("/sleep?leve=1", "leve"),
        ("/pause?clear_cache=maybe", "clear_cache"),
        ("/resume?tags=weights", "tags"),
    ],
)
def test_what_there_is_not_is_refused(server, target, parameter):
    reply = server.post(target, b"")
    assert (reply.status, reply.error["param"]) == (400, parameter)
    assert server.engine.operations.asked == []


def test_what_is_asleep_is_told(server):
    def told():
        paths = ("/is_sleeping", "/is_paused")
        return [next(iter(server.get(path).json.values())) for path in paths]

    assert told() == [False, False]
    server.post("/pause", b"")
    assert told() == [True, True]
    assert 'sleep_state="awake"} 1.0' in server.get("/metrics").body.decode()
    server.post("/resume", b"")
    server.post("/sleep?level=2", b"")
    assert 'sleep_state="discard_all"} 1.0' in server.get("/metrics").body.decode()
    server.post("/wake_up", b"")
    assert told() == [False, False]


def test_weights_are_replaced_by_those_below_the_root(server):
    assert server.get("/get_weight_version").json == {"weight_version": "default"}
    reply = server.post("/update_weights", {"path": "step-1", "version": "s1", "mode": "keep"})
    assert reply.json == {"weight_version": "s1"}
    path = str((server.weights / "step-1").resolve())
    assert server.engine.operations.asked == [UpdateWeights(path, "s1", "keep")]
    assert server.get("/get_weight_version").json == {"weight_version": "s1"}
    assert server.post("/update_weights", {"path": "step-1"}).json == {"weight_version": "1"}


@pytest.mark.parametrize("path", ["step-2", "..", "/etc", "", "step-1/../..", "\0"])
def test_other_files_cannot_be_named(server, path):
    reply = server.post("/update_weights", {"path": path})
    assert (reply.status, reply.error["param"]) == (400, "path")
    assert "weights_root" in reply.error["message"]
    assert server.engine.operations.asked == []


def test_weights_that_do_not_fit_are_the_clients_fault(server):
    server.engine.operations.error = CheckpointError("a tensor is missing")
    reply = server.post("/update_weights", {"path": "step-1"})
    assert (reply.status, reply.error["message"]) == (400, "a tensor is missing")


def test_without_a_root_no_weights_are_read():
    with LiveServer(**ADMIN) as plain:
        reply = plain.post("/update_weights", {"path": "step-1"})
        assert (reply.status, reply.error["code"]) == (403, "admin_disabled")
