"""`tokenmill route` in front of fake servers: who gets a request, and who the next try."""

from __future__ import annotations

import json
from http.client import IncompleteRead

import pytest

from helpers.exposition import families, value
from helpers.fake_engine import FakeEngine, Script
from helpers.live_router import LiveRouter, RawBackend, answer, header, named, who
from helpers.live_server import LiveServer

TWO_BLOCKS = "x" * 256


def busy(head, body, writer):
    writer.write(answer(b'{"error": "busy"}', status=429, retry_after=7))


def unready(head, body, writer):
    writer.write(answer(b'{"error": "draining"}', status=503, retry_after=30))


def dead(head, body, writer):
    writer.close()


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


def test_references_to_items_go_to_their_backend():
    """Those of tokenmill's servers, whose items are named after the response."""

    def says(word):
        return LiveServer(FakeEngine(lambda prompt, params: Script([word])))

    with (
        says(40) as first,
        says(41) as second,
        LiveRouter(first.url, second.url, policy="round_robin") as router,
    ):

        def ask(*items):
            reply = router.post(
                "/v1/responses", {"input": [*items, {"role": "user", "content": "x"}]}
            )
            assert reply.status == 200, reply.error
            return reply.json["output"][0]

        made = [ask() for _ in range(2)]
        texts = [item["content"][0]["text"] for item in made]
        assert texts[0] != texts[1]
        for i in (1, 1, 0, 1, 0, 0):
            id = made[i]["id"]
            for item in (
                {"type": "item_reference", "id": id},
                {"id": id, "type": "item_reference"},
                {"id": id},
            ):
                assert ask(item)["content"][0]["text"] == texts[i]
        # What is only like one decides nothing: these take turns.
        mentions = {"role": "user", "content": f'{{"id": "{made[0]["id"]}"}}'}
        assert {ask(mentions)["content"][0]["text"] for _ in range(2)} == set(texts)
        assert {ask(made[0])["content"][0]["text"] for _ in range(2)} == set(texts)
