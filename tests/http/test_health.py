"""Probes, models, tokens, load, and the end of a server."""

from __future__ import annotations

import threading

import pytest

import tokenmill
from helpers.fake_engine import FakeEngine, Script, tiny_tokenizer
from helpers.live_server import LiveServer, chunks_of


@pytest.fixture(scope="module")
def server():
    with LiveServer(served_model_name=["a", "org/b"]) as server:
        yield server


def test_probes(server):
    for path in ("/health", "/ready", "/ping"):
        assert server.get(path).status == 200
    assert server.post("/ping", b"").status == 200
    assert server.get("/version").json == {"version": tokenmill.__version__}


def test_probes_may_ask_for_the_head_alone(server):
    for path in ("/health", "/ready", "/ping"):
        reply = server.request("HEAD", path)
        assert (reply.status, reply.body) == (200, b"")


def test_b035_a_dead_or_frozen_engine_is_not_healthy():
    with LiveServer() as server:
        server.engine.is_ready = server.engine.is_healthy = False  # the core starts again
        for path in ("/health", "/ping", "/ready"):
            reply = server.get(path)
            assert (reply.status, reply.error["code"]) == (503, "unavailable")
            assert int(reply.headers["retry-after"]) >= 1
        assert server.complete().status == 200  # waits for the next core
        server.engine.is_ready = server.engine.is_healthy = True
        assert server.get("/health").status == 200
        server.engine.is_draining = True
        refused = server.complete()
        assert (refused.status, refused.error["code"]) == (503, "engine_draining")
        assert int(refused.headers["retry-after"]) >= 1
        server.state.dead = True
        assert server.get("/health").status == 503
        assert server.complete().status == 503


def test_while_draining_what_runs_may_finish_and_nothing_else_begins():
    drained = threading.Event()
    slow = FakeEngine(lambda prompt, params: Script(prompt, gates={1: drained}))
    with LiveServer(slow) as server:
        replies = []
        thread = threading.Thread(target=lambda: replies.append(server.complete(stream=True)))
        thread.start()
        server.wait_until(lambda: server.engine.running)
        server.state.draining = True
        assert server.get("/ready").status == 503
        assert server.get("/health").status == 200
        for refused in (server.complete(), server.complete(stream=True), server.chat()):
            assert refused.status == 503
            assert refused.headers["connection"] == "close"
            assert int(refused.headers["retry-after"]) >= 1
        drained.set()
        thread.join()
        assert len(chunks_of(replies[0])) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_are_ended_tell_their_clients(stream):
    never = threading.Event()
    slow = FakeEngine(lambda prompt, params: Script([5] * 100, gates={1: never}))
    with LiveServer(slow) as server:
        replies = []
        thread = threading.Thread(
            target=lambda: replies.append(server.complete(stream=stream, max_tokens=99))
        )
        thread.start()
        server.wait_until(lambda: server.engine.running)
        server.wait_until(lambda: server.state.metrics.num_output_tokens or not stream)
        server.loop.call_soon_threadsafe(server.state.stop_active)
        thread.join()
        (reply,) = replies
        if stream:
            *_, error = chunks_of(reply)
            assert error["error"]["code"] == "unavailable"
        else:
            assert reply.status == 503
            assert reply.error["code"] == "unavailable"
        assert not server.engine.running


def test_models(server):
    body = server.get("/v1/models").json
    assert body["object"] == "list"
    assert [model["id"] for model in body["data"]] == ["a", "org/b"]
    one = server.get("/v1/models/org/b").json
    assert one["object"] == "model"
    assert one["root"] == "fake/model"
    assert one["max_model_len"] == 512
    assert server.complete(model="org/b").json["model"] == "org/b"
    assert server.complete().json["model"] == "a"
    assert server.complete(model="fake/model").status == 404


def test_load(server):
    assert server.get("/load").json["server_load"] == 0


def test_b097_tokens_of_a_prompt(server):
    reply = server.post("/tokenize", {"prompt": "One two", "return_token_strs": True}).json
    ids = tiny_tokenizer().encode("One two")
    assert reply == {
        "count": len(ids),
        "max_model_len": 512,
        "tokens": ids,
        "token_strs": ["One", " two"],
    }
    assert server.post("/detokenize", {"tokens": ids}).json == {"prompt": "One two"}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": "Yes"},
            ],
            "continue_final_message": True,
        },
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "chat_template_kwargs": {"x": 1},
        },
    ],
)
def test_b097_tokens_of_a_chat_are_those_of_the_chat(server, fields):
    tokens = server.post("/tokenize", fields).json
    chat = server.chat(**fields, return_token_ids=True).json
    assert tokens["count"] == chat["usage"]["prompt_tokens"]
    assert tokens["tokens"] == chat["prompt_token_ids"]


def test_b019_b097_impossible_ids(server):
    for bad in (-1, 10**6, 2**63, 2**80):
        reply = server.post("/detokenize", {"tokens": [5, bad]})
        assert (reply.status, reply.error["param"]) == (400, "tokens")
        assert str(bad) in reply.error["message"]
    assert server.post("/tokenize", {"prompt": "\ud800"}).status == 400
    both = server.post("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": ""}]})
    assert (both.status, both.error["param"]) == (400, "prompt")
    assert server.post("/detokenize", {"tokens": []}).json == {"prompt": ""}


def test_a_prefix_that_a_proxy_strips():
    with LiveServer(root_path="/llm", api_key=["k"]) as server:
        assert server.get("/health").status == 200
        assert server.get("/v1/models").status == 200
        assert server.complete().status == 200
        assert server.get("/openapi.json").status == 200
        server.headers = {}
        assert server.get("/health").status == 200
        assert server.get("/v1/models").status == 401
        assert server.get("/llm/health").status == 401
