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
from helpers.live_router import LiveRouter, RawBackend, answer
from helpers.live_server import LiveServer, chunks_of

TWO_BLOCKS = "x" * 256


def busy(head, body, writer):
    writer.write(answer(b'{"error": "busy"}', status=429, retry_after=7))


def unready(head, body, writer):
    writer.write(answer(b'{"error": "draining"}', status=503, retry_after=30))


def dead(head, body, writer):
    writer.close()


def named(name):
    def behave(head, body, writer):
        writer.write(answer(json.dumps({"by": name}).encode()))

    return behave


def who(reply):
    assert reply.status == 200, reply.body
    return reply.json["by"]


def header(head, name):
    found = [
        line.split(b": ", 1)[1] for line in head.split(b"\r\n") if line.startswith(name + b": ")
    ]
    assert len(found) <= 1
    return found[0] if found else None


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


# ---- another try --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [busy, unready, dead], ids=["429", "503", "dropped"])
def test_another_backend_is_tried_where_nothing_has_come(bad):
    with (
        RawBackend(bad) as first,
        RawBackend(named("good")) as second,
        LiveRouter(first.url, second.url, policy="round_robin") as router,
    ):
        assert [who(router.post("/v1/x", {"a": 1})) for _ in range(4)] == ["good"] * 4
        assert first.requests
        # Whoever has said that it cannot, or not now, is not asked again at once.
        if bad is not dead:
            assert len(first.requests) == 1


def test_what_the_last_backend_says_is_what_the_client_hears():
    with RawBackend(busy) as first, RawBackend(busy) as second:
        with LiveRouter(first.url, second.url) as router:
            reply = router.post("/v1/x", {})
            assert (reply.status, reply.headers["retry-after"]) == (429, "7")
            assert len(first.requests) == len(second.requests) == 1
            assert router.get("/ready").status == 200
        with LiveRouter(first.url, second.url, retries=0) as router:
            assert router.post("/v1/x", {}).status == 429
            assert len(first.requests) + len(second.requests) == 3
    with RawBackend(unready) as only, LiveRouter(only.url) as router:
        assert router.post("/v1/x", {}).json == {"error": "draining"}
        reply = router.post("/v1/x", {})
        assert (reply.status, reply.error["code"]) == (503, "unavailable")
        assert 20 < int(reply.headers["retry-after"]) <= 30
        assert router.get("/ready").status == 503
        assert router.get("/health").status == 200
        assert len(only.requests) == 1


def test_nothing_is_tried_again_once_bytes_have_gone_out():
    def cut(head, body, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        writer.close()

    with (
        RawBackend(cut) as first,
        RawBackend(named("good")) as second,
        LiveRouter(first.url, second.url, policy="round_robin") as router,
    ):
        connection = router.open("/v1/x", {})
        with pytest.raises((IncompleteRead, ConnectionError)):
            connection.getresponse().read()
        connection.close()
        assert len(first.requests) == 1
        assert second.requests == []


def test_a_kept_connection_that_was_closed_costs_nothing():
    with RawBackend(named("x")) as backend, LiveRouter(backend.url, health_interval=60) as router:
        for _ in range(3):
            who(router.post("/v1/x", {}))
        assert backend.num_connections <= 2  # connections are kept

        def last(head, body, writer):
            writer.write(answer(b'{"by": "x"}'))
            writer.get_extra_info("socket").shutdown(2)

        backend.behave = last
        for _ in range(3):
            who(router.post("/v1/x", {}))
        assert value(families(router), "tokenmill_router:backend_errors_total") == 0


def test_a_backend_that_goes_and_one_that_comes_back():
    with (
        RawBackend(named("a")) as first,
        RawBackend(named("b")) as second,
        LiveRouter(first.url, second.url, policy="round_robin") as router,
    ):
        assert {who(router.post("/v1/x", {})) for _ in range(4)} == {"a", "b"}
        second.stop()
        assert {who(router.post("/v1/x", {})) for _ in range(4)} == {"a"}
        router.wait_until(lambda: not router.state.backends[1].is_up)
        first.is_well = False
        router.wait_until(lambda: router.get("/ready").status == 503)
        num_requests = len(first.requests)
        reply = router.post("/v1/x", {})
        assert (reply.status, reply.error["code"]) == (503, "unavailable")
        assert int(reply.headers["retry-after"]) >= 1
        assert len(first.requests) == num_requests
        first.is_well = True
        router.wait_until_ready()
        assert who(router.post("/v1/x", {})) == "a"


def test_failures_in_a_row_are_an_outlier_unless_there_is_no_other():
    def broken(head, body, writer):
        writer.write(answer(b"{}", status=500))

    with RawBackend(broken) as first, RawBackend(named("good")) as second:
        with LiveRouter(first.url, second.url, policy="round_robin", eject_after=2) as router:
            statuses = [router.post("/v1/x", {}).status for _ in range(8)]
            assert statuses.count(500) == len(first.requests) == 2
            assert router.state.backends[0].num_ejections == 1
        with LiveRouter(first.url, eject_after=2) as router:
            assert [router.post("/v1/x", {}).status for _ in range(5)] == [500] * 5


# ---- who gets it --------------------------------------------------------------------------------


def test_a_conversation_stays_where_it_began():
    with (
        RawBackend(named("a")) as first,
        RawBackend(named("b")) as second,
        LiveRouter(first.url, second.url) as router,
    ):

        def talk(subject, turns):
            messages = [{"role": "user", "content": f"{subject} {TWO_BLOCKS}"}] * turns
            return who(router.post("/v1/chat/completions", {"model": "m", "messages": messages}))

        homes = {subject: talk(subject, 1) for subject in ("cats", "dogs")}
        assert sorted(homes.values()) == ["a", "b"]
        for turns in range(2, 5):
            assert {subject: talk(subject, turns) for subject in homes} == homes
        ids = {name: who(router.post("/v1/completions", {"prompt": [number] * 200}))
               for name, number in (("x", 7), ("y", 8))}  # fmt: skip
        again = {name: who(router.post("/v1/completions", {"prompt": [number] * 300}))
                 for name, number in (("x", 7), ("y", 8))}  # fmt: skip
        assert ids == again
        found = families(router)
        picks = "tokenmill_router:picks_total"
        assert value(found, picks, reason="prefix") == 8
        assert value(found, picks, reason="load") == 4
        prompt = value(found, "tokenmill_router:prompt_bytes_total")
        assert prompt / 4 < value(found, "tokenmill_router:prompt_bytes_matched_total") < prompt
        assert value(found, "tokenmill_router:index_blocks") > 0


def test_sessions():
    with (
        RawBackend(named("a")) as first,
        RawBackend(named("b")) as second,
        LiveRouter(first.url, second.url, policy="session") as router,
    ):
        homes = set()
        for number in range(12):
            by_header = who(router.post("/v1/x", {}, **{"x-session-id": f"s{number}"}))
            assert who(router.post("/v1/x", {"user": f"s{number}"})) == by_header
            assert who(router.post("/v1/x", {"prompt_cache_key": f"s{number}"})) == by_header
            homes.add(by_header)
        assert homes == {"a", "b"}
        assert {who(router.post("/v1/x", {})) for _ in range(4)} == {"a", "b"}  # without any


def test_models_are_routed_by_name_and_listed_once():
    with (
        RawBackend(named("a"), models=("m", "only-a")) as first,
        RawBackend(named("b"), models=("m", "only-b")) as second,
        LiveRouter(first.url, second.url, policy="round_robin") as router,
    ):
        assert {who(router.post("/v1/x", {"model": "only-a"})) for _ in range(3)} == {"a"}
        assert {who(router.post("/v1/x", {"model": "only-b"})) for _ in range(3)} == {"b"}
        assert {who(router.post("/v1/x", {"model": "m"})) for _ in range(3)} == {"a", "b"}
        data = router.get("/v1/models").json["data"]
        assert [each["id"] for each in data] == ["m", "only-a", "only-b"]
        assert data[0]["at"] == first.port
        reply = router.post("/v1/x", {"model": "other"})
        assert reply.status == 404
        assert "'m', 'only-a', 'only-b'" in reply.error["message"]
        second.models = ("m", "new")
        router.wait_until(lambda: router.post("/v1/x", {"model": "new"}).status == 200)


def test_what_concerns_all_goes_to_all():
    with RawBackend() as first, RawBackend() as second:
        with LiveRouter(first.url, second.url) as router:
            router.post("/v1/completions", {"prompt": TWO_BLOCKS})
            assert value(families(router), "tokenmill_router:index_blocks") == 2
            assert router.post("/reset_prefix_cache", {}).status == 200
            assert value(families(router), "tokenmill_router:index_blocks") == 0
            second.behave = lambda head, body, writer: writer.write(answer(b"no", status=400))
            first.models = ("m", "adapter")
            assert router.post("/v1/load_lora_adapter", {"lora_name": "x"}).body == b"no"
            assert router.post("/v1/x", {"model": "adapter"}).status == 200
        for backend in (first, second):
            paths = [head.split(b" ")[1] for head, _ in backend.requests]
            assert b"/reset_prefix_cache" in paths
            assert b"/v1/load_lora_adapter" in paths


# ---- one computes the prompt, another one goes on -----------------------------------------------

HELD = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_port": 9}


def prefills(head, body, writer):
    writer.write(answer(json.dumps({"choices": [], "kv_transfer_params": HELD}).encode()))


def pair(prefill, decode, **args):
    return LiveRouter(prefill=[prefill.url], decode=[decode.url], **args)


def test_a_prompt_is_computed_by_one_backend_and_answered_by_another():
    with (
        RawBackend(prefills) as first,
        RawBackend(named("decode")) as second,
        pair(first, second) as router,
    ):
        fields = {
            "model": "m", "prompt": "a", "max_tokens": 50, "min_tokens": 9, "n": 2, "stream": True,
            "stream_options": {"include_usage": True}, "temperature": 0.5,
        }  # fmt: skip
        assert who(router.post("/v1/completions", fields)) == "decode"
        asked, answered = json.loads(first.requests[0][1]), json.loads(second.requests[0][1])
        assert asked == {
            "model": "m", "prompt": "a", "max_tokens": 1, "n": 1, "stream": False,
            "temperature": 0.5,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }  # fmt: skip
        assert answered == {**fields, "kv_transfer_params": HELD}
        ids = [header(each.requests[0][0], b"x-request-id") for each in (first, second)]
        assert ids[0] == ids[1]
        router.post("/v1/chat/completions", {"messages": [], "max_completion_tokens": 9})
        asked = json.loads(first.requests[1][1])
        assert asked["max_completion_tokens"] == 1
        assert "max_tokens" not in asked
        for path, body in (("/v1/embeddings", {"input": "a"}), ("/v1/completions", b"[]")):
            who(router.post(path, body))
        assert len(first.requests) == 2
        assert json.loads(second.requests[-2][1]) == {"input": "a"}
        assert router.get("/ready").status == 200
        second.is_well = False
        router.wait_until(lambda: router.get("/ready").status == 503)


def test_without_a_prefill_backend_the_other_one_computes_prompts_as_well():
    def failed(head, body, writer):
        writer.write(answer(b"{}", status=500))

    def silent(head, body, writer):
        writer.write(answer(b'{"choices": []}'))

    with (
        RawBackend(failed) as first,
        RawBackend(named("decode")) as second,
        pair(first, second) as router,
    ):
        for first.behave in (failed, silent, busy, dead, unready):
            assert who(router.post("/v1/completions", {"prompt": "a"})) == "decode"
            assert json.loads(second.requests[-1][1]) == {"prompt": "a"}
        # A connection that was kept and ends is no reason: the request was sent once more.
        assert len(first.requests) == 5 + 1
        first.stop()
        assert who(router.post("/v1/completions", {"prompt": "a"})) == "decode"


def test_what_a_prefill_backend_has_against_a_request_is_the_answer():
    def refuses(head, body, writer):
        writer.write(answer(b'{"error": {"message": "no"}}', status=400))

    with (
        RawBackend(refuses) as first,
        RawBackend(named("decode")) as second,
        pair(first, second) as router,
    ):
        reply = router.post("/v1/completions", {"prompt": "a"})
        assert (reply.status, reply.error["message"]) == (400, "no")
        assert second.requests == []


def test_what_is_about_a_response_goes_to_its_backend():
    def makes(name):
        def behave(head, body, writer):
            made = {"by": name, "object": "response", "id": f"resp_{name}"}
            writer.write(answer(json.dumps(made).encode()))

        return behave

    def streams(head, body, writer):
        event = b'data: {"type": "response.created", "response": {"id": "resp_streamed"}}\n\n'
        writer.write(answer(event + b"data: x\n\n" * 4096, content_type="text/event-stream"))

    with (
        RawBackend(makes("a")) as first,
        RawBackend(makes("b")) as second,
        LiveRouter(first.url, second.url, policy="round_robin") as router,
    ):
        assert [who(router.post("/v1/responses", {})) for _ in range(2)] == ["a", "b"]
        for name in ("b", "b", "a", "b"):
            assert who(router.get(f"/v1/responses/resp_{name}")) == name
            assert who(router.post(f"/v1/responses/resp_{name}/cancel", {})) == name
            follow_up = {"previous_response_id": f"resp_{name}"}
            assert who(router.post("/v1/responses", follow_up)) == name
        second.behave = streams
        for _ in range(2):
            router.post("/v1/responses", {"stream": True})
        second.behave = makes("b")
        for _ in range(3):
            assert who(router.get("/v1/responses/resp_streamed")) == "b"
        second.is_well = False
        router.wait_until(lambda: not router.state.backends[1].is_available)
        assert who(router.get("/v1/responses/resp_b")) == "a"
