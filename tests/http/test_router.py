"""`tokenmill route` in front of fake servers: what passes through, and what happens around it."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import IncompleteRead

import pytest

from helpers.exposition import families, value
from helpers.fake_engine import FakeEngine, Script
from helpers.live_router import LiveRouter, RawBackend, answer, header, named, who
from helpers.live_server import LiveServer, chunks_of

# ---- what passes through ----------------------------------------------------------------------


def test_answers_and_streams_are_those_of_the_server():
    with LiveServer() as server, LiveRouter(server.url) as router:
        fields = {"max_tokens": 5, "seed": 1}
        direct, routed = server.complete(**fields), router.complete(**fields)
        assert routed.status == 200
        assert routed.json["choices"] == direct.json["choices"]
        chunks = chunks_of(router.chat(max_tokens=4, stream=True))
        assert chunks[-1]["choices"][0]["finish_reason"]
        assert router.post("/tokenize", {"prompt": "a b"}).json["tokens"]
        refused = router.complete(temperature=-1)
        assert refused.status == 400
        assert refused.error["param"] == "temperature"
        assert router.get("/v1/models").json["data"][0]["id"] == "fake/model"
        assert router.get("/v1/models/fake/model").json["id"] == "fake/model"
        assert router.get("/v1/models/other").status == 404
        for path in ("/health", "/ready", "/ping", "/version", "/load", "/metrics"):
            assert router.get(path).status == 200
        assert router.post("/v1/chat/completions", b"{").status == 400  # the server's own word


def test_pieces_come_as_they_are_sent_whatever_they_are():
    pieces = [
        b": hi\n\n",
        b"data: {\xff\n\n",
        b"data: 1\r\n\r\ndata: 2",
        b"\n\n",
        gzip.compress(b"x"),
    ]
    go_on = [threading.Event() for _ in pieces]

    async def behave(head, body, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nx-mine: 1\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece, event in zip(pieces, go_on, strict=True):
            while not event.is_set():
                await asyncio.sleep(0.002)
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        writer.write(b"0\r\n\r\n")

    with RawBackend(behave) as backend, LiveRouter(backend.url) as router:
        connection = router.open("/v1/completions", {"prompt": "a"})
        go_on[0].set()
        response = connection.getresponse()
        assert response.headers["x-mine"] == "1"
        got = [response.read1()]
        for event in go_on[1:]:
            event.set()
            got.append(response.read1())
        assert got == pieces
        assert response.read1() == b""
        connection.close()


def test_an_answer_that_ends_with_its_connection_and_one_behind_a_hint():
    def until_eof(head, body, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/x\r\n\r\nall of it")
        writer.close()

    def hint(head, body, writer):
        writer.write(b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + answer(b"late", x_a="1"))

    with RawBackend(until_eof) as backend, LiveRouter(backend.url) as router:
        for _ in range(2):
            assert router.post("/v1/x", {}).body == b"all of it"
        backend.behave = hint
        reply = router.post("/v1/x", {})
        assert reply.body == b"late"
        assert "link" not in reply.headers


def test_what_a_backend_sends_besides_its_answer_reaches_nobody():
    chunked = b"HTTP/1.1 %s\r\ntransfer-encoding: chunked\r\n\r\n3\r\nall\r\n0\r\n%s\r\n"
    sent = {
        "/v1/second": answer(b"all") + answer(b"of another", x_other="1"),
        "/v1/trailer": chunked % (b"200 OK", b"x-trailer: 1\r\n"),
        "/v1/refused": chunked % (b"429 No", b"x-trailer: 1\r\n"),
        "/v1/status": b"HTTP/1.1 700 X\r\ncontent-length: 0\r\n\r\n",
    }

    def behave(head, body, writer):
        writer.write(sent[head.split(b" ")[1].decode()])

    with RawBackend(behave) as backend, LiveRouter(backend.url, eject_after=99) as router:
        for path in ("/v1/second", "/v1/trailer", "/v1/second", "/v1/refused"):
            reply = router.post(path, {})
            assert reply.body == b"all", path
            assert not {"x-other", "x-trailer"} & reply.headers.keys()
        assert reply.status == 429
        assert router.post("/v1/status", {}).status == 502


def test_what_a_backend_is_told():
    with RawBackend() as backend, LiveRouter(backend.url, root_path="/pre") as router:
        given = {
            "authorization": "Bearer client", "x-request-id": "mine", "x-extra": "1",
            "connection": "x-secret", "x-secret": "hop", "te": "trailers",
        }  # fmt: skip
        reply = router.request("POST", "/v1/a%20b?c=d&e", {"prompt": "a"}, given)
        assert reply.headers["x-request-id"] == "mine"
        head, body = backend.requests[0]
        assert head.startswith(b"POST /v1/a%20b?c=d&e HTTP/1.1\r\n")
        assert header(head, b"x-request-id") == b"mine"
        assert header(head, b"authorization") == b"Bearer client"
        assert header(head, b"host") == f"127.0.0.1:{backend.port}".encode()
        assert header(head, b"x-extra") == b"1"
        assert header(head, b"x-secret") is None
        assert header(head, b"te") is None
        assert json.loads(body) == {"prompt": "a"}
        fresh = router.post("/v1/x", {}).headers["x-request-id"]
        assert header(backend.requests[1][0], b"x-request-id") == fresh.encode()


def test_keys_of_the_router_and_of_the_backends():
    with (
        LiveServer(api_key=["inner"]) as server,
        LiveRouter(server.url, api_key=["outer"], backend_api_key=["inner"]) as router,
    ):
        assert router.complete(max_tokens=1).status == 401
        assert router.get("/v1/models").status == 401
        assert router.get("/health").status == 200
        router.headers = {"authorization": "Bearer outer"}
        assert router.complete(max_tokens=1).status == 200
        assert router.get("/v1/models").json["data"]
    with LiveServer(api_key=["inner"]) as server, LiveRouter(server.url) as router:
        assert router.complete(max_tokens=1).status == 401
        assert router.get("/v1/models").json["data"] == []
        router.headers = {"authorization": "Bearer inner"}
        assert router.complete(max_tokens=1).status == 200
        assert router.get("/v1/models").json["data"][0]["id"] == "fake/model"
    with RawBackend() as backend:
        secrets = {"api_key": ["outer"], "backend_api_key": ["inner"]}
        with LiveRouter(backend.url, **secrets) as router:
            router.post("/v1/messages", {}, **{"x-api-key": "outer"})
        head = backend.requests[0][0]
        assert header(head, b"x-api-key") == b"inner"
        assert b"outer" not in head


def test_what_is_refused_here():
    with RawBackend() as backend, LiveRouter(backend.url, max_body_bytes=2048) as router:
        reply = router.post("/v1/completions", {"prompt": "x" * 4096})
        assert reply.status == 413
        assert "max_body_bytes" in reply.error["message"]
        for path in ("/admin", "/v1/../admin", "/v1/%2e%2e/admin"):
            assert router.post(path, {}).status == 404
        assert router.request("PUT", "/v1/completions", {}).status == 405
        assert router.post("/metrics", {}).status == 405
        assert router.post("/v1/completions", {"model": "none"}).status == 404
        assert router.post("/v1/messages", {"model": "none"}).json["type"] == "error"
        assert backend.requests == []


def test_no_more_at_a_time_than_is_allowed():
    gate = threading.Event()
    engine = FakeEngine(lambda prompt, params: Script([5] * 3, gates={0: gate}))
    with LiveServer(engine) as server, LiveRouter(server.url, max_in_flight=1) as router:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(router.complete, max_tokens=3)
            router.wait_until(lambda: router.state.num_inside == 1)
            reply = router.complete(max_tokens=1)
            assert reply.status == 429
            assert "max_in_flight" in reply.error["message"]
            assert reply.headers["retry-after"] == "1"
            gate.set()
            assert first.result().status == 200
        assert router.complete(max_tokens=1).status == 200


# ---- clients that leave, backends that are slow -------------------------------------------------


def test_a_client_that_leaves_frees_its_request_at_the_backend():
    engine = FakeEngine(lambda prompt, params: Script([5] * 400, step_seconds=0.01))
    with LiveServer(engine) as server, LiveRouter(server.url) as router:
        fields = {"prompt": "a", "max_tokens": 400}
        streaming = router.open("/v1/completions", {**fields, "stream": True})
        assert streaming.getresponse().read1()
        waiting = router.open("/v1/completions", fields)
        router.wait_until(lambda: len(engine.running) == 2)
        streaming.close()
        waiting.close()
        router.wait_until(lambda: engine.num_aborted == 2 and not engine.running)
        router.wait_until(lambda: router.state.num_inside == 0)
        assert [each.in_flight for each in router.state.backends] == [0]
        found = families(router)
        assert value(found, "tokenmill_router:requests_total", status="499") == 2


def test_a_slow_backend_does_not_stop_others():
    gate = threading.Event()

    async def wait(head, body, writer):
        while not gate.is_set():
            await asyncio.sleep(0.005)
        writer.write(answer(b'{"by": "slow"}'))

    with (
        RawBackend(wait) as slow,
        RawBackend(named("quick")) as quick,
        LiveRouter(slow.url, quick.url, policy="least_loaded") as router,
        ThreadPoolExecutor(1) as pool,
    ):
        stuck = pool.submit(router.post, "/v1/x", {})
        router.wait_until(lambda: slow.requests)
        assert {who(router.post("/v1/x", {})) for _ in range(5)} == {"quick"}
        gate.set()
        assert who(stuck.result()) == "slow"


def test_a_backend_waits_for_a_client_that_does_not_read():
    piece, count = b"x" * (1 << 20), 64
    sent = 0

    async def behave(head, body, writer):
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (len(piece) * count))
        for _ in range(count):
            writer.write(piece)
            await writer.drain()
            sent += 1

    with RawBackend(behave) as backend, LiveRouter(backend.url) as router:
        connection = router.open("/v1/x", {})
        response = connection.getresponse()
        before = -1
        while before != sent or not sent:
            before = sent
            time.sleep(0.2)
        assert sent < count  # the rest is neither here nor in the router
        size = 0
        while got := response.read(1 << 20):
            size += len(got)
        assert (size, sent) == (len(piece) * count, count)
        connection.close()


def test_a_backend_that_says_nothing_is_given_up():
    async def forever(head, body, writer):
        await asyncio.sleep(1000)

    async def half(head, body, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        await asyncio.sleep(1000)

    with RawBackend(forever) as backend, LiveRouter(backend.url, backend_timeout=0.2) as router:
        reply = router.post("/v1/x", {})
        assert reply.status == 504
        assert len(backend.requests) == 1
        backend.behave = half
        connection = router.open("/v1/x", {})
        with pytest.raises((IncompleteRead, ConnectionError)):
            connection.getresponse().read()
        connection.close()
        router.wait_until(lambda: backend.num_lost == 2)
        assert value(families(router), "tokenmill_router:backend_errors_total", kind="timeout") == 2
