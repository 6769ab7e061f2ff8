"""Responses over several requests: continued, looked at, forgotten; computed in the background."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from helpers.fake_engine import FakeEngine, Script, tiny_tokenizer
from helpers.live_server import LiveServer
from helpers.responses import NOW, ask, events_of, post, response_of, shown
from helpers.tool_chats import BOTH, ONE
from tokenmill.config.serve_args import ServeArgs
from tokenmill.contracts.request import FinishReason
from tokenmill.entrypoints.http.state import make_state
from tokenmill.errors import ConfigError


def path_of(response, more=""):
    return f"/v1/responses/{response['id']}{more}"


def tokenized(server, *messages):
    return server.post("/tokenize", {"messages": list(messages)}).json["tokens"]


def prompt_of(server):
    return server.engine.calls[-1][0].token_ids


@BOTH
def test_a_response_is_continued(server, stream):
    first = ask(server, f"<think>Hm.</think>I look. {ONE}", stream=stream, tools=[NOW],
                instructions="Be brief.")  # fmt: skip
    call = first["output"][2]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
    second = ask(server, "Five.", stream=stream, tools=[NOW], input=[result],
                 previous_response_id=first["id"])  # fmt: skip
    assert second["previous_response_id"] == first["id"]
    third = ask(server, "Bye.", stream=stream, input="Thanks", previous_response_id=second["id"],
                store=False)  # fmt: skip
    called = {"id": call["call_id"], "type": "function"}
    called["function"] = {"name": "get_weather", "arguments": {"city": "Paris"}}
    assert prompt_of(server) == tokenized(
        server,
        {"role": "user", "content": "Hi"},  # the instructions were those of the first one only
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [called],
        },
        {"role": "tool", "tool_call_id": call["call_id"], "name": "get_weather", "content": "5"},
        {"role": "assistant", "content": "Five."},
        {"role": "user", "content": "Thanks"},
    )
    assert not third["store"]
    assert server.get(path_of(third)).status == 404
    # A branch: the same response can be continued again.
    ask(server, "Yes?", stream=stream, input="Or so", previous_response_id=first["id"])
    assert server.get(path_of(first)).json == first


@BOTH
def test_an_answer_that_was_cut_off_in_a_call_can_be_continued(server, stream):
    cut = ask(server, ONE[:-25], stream=stream, reason=FinishReason.LENGTH, tools=[NOW])
    assert cut["status"] == "incomplete"
    again = ask(server, "Ho", stream=stream, input="Go on", previous_response_id=cut["id"])
    assert again["status"] == "completed"


def test_nobody_can_guess_what_is_kept(server):
    """Without keys, an id is all that is needed to look at what it names."""
    responses = [ask(server, "Ho.", stream=False) for _ in range(2)]
    items = [server.get(path_of(each, "/input_items")).json["data"][0] for each in responses]
    for one, other in (
        [each["id"] for each in responses],
        [each["output"][0]["id"] for each in responses],
        [each["id"] for each in items],
    ):
        secret = one.split("_")[1]
        assert len(secret) == 32
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 24


def test_items_can_be_referred_to(server):
    first = ask(server, "Ho.", stream=False, input=[{"role": "user", "content": "a"}])
    (given,) = server.get(path_of(first, "/input_items")).json["data"]
    references = [{"type": "item_reference", "id": given["id"]}, {"id": first["output"][0]["id"]}]
    ask(server, "", stream=False, input=[*references, {"role": "user", "content": "b"}])
    assert prompt_of(server) == tokenized(
        server,
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Ho."},
        {"role": "user", "content": "b"},
    )


def test_no_more_can_be_referred_to_than_sent():
    """A short request could bring gigabytes by naming one item a thousand times."""
    given = [{"role": "user", "content": "a", "note": "x" * 900}]
    with LiveServer(max_body_bytes=2_000) as server:
        first = post(server, input=given).json
        (item,) = server.get(path_of(first, "/input_items")).json["data"]
        reference = {"type": "item_reference", "id": item["id"]}
        assert post(server, input=[reference]).status == 200
        reply = post(server, input=[reference] * 3)
        assert (reply.status, reply.error["param"]) == (400, "input")
        second = post(server, input=given, previous_response_id=first["id"]).json
        assert second["status"] == "completed"
        reply = post(server, previous_response_id=second["id"])
        assert (reply.status, reply.error["param"]) == (400, "previous_response_id")
        assert "max_body_bytes" in reply.error["message"]


def test_the_input_is_listed_page_by_page(server):
    given = [{"role": "user", "content": str(i)} for i in range(5)]
    given[2] = {"type": "function_call_output", "call_id": "c", "output": "x", "id": "fco_1"}
    first = ask(server, "Ho.", stream=False, input=given)
    whole = server.get(path_of(first, "/input_items?order=asc")).json
    assert [item["type"] for item in whole["data"]] == [
        "message", "message", "function_call_output", "message", "message"
    ]  # fmt: skip
    assert whole["data"][0]["content"] == [{"type": "input_text", "text": "0"}]
    ids = [item["id"] for item in whole["data"]]
    assert (ids[2], whole["has_more"]) == ("fco_1", False)
    assert (whole["first_id"], whole["last_id"]) == (ids[0], ids[-1])
    page = server.get(path_of(first, "/input_items?limit=2")).json
    assert [item["id"] for item in page["data"]] == ids[:2:-1]
    assert page["has_more"]
    rest = server.get(path_of(first, f"/input_items?limit=100&after={page['last_id']}")).json
    assert [item["id"] for item in rest["data"]] == ids[2::-1]
    last = server.get(path_of(first, f"/input_items?after={ids[0]}")).json
    assert (last["data"], last["has_more"]) == ([], False)
    for query, name in (
        ("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"),
        ("limit=0000000011", "limit"), ("limit=" + "0" * 5000 + "1", "limit"),
        ("order=up", "order"), ("after=x", "after"),
    ):  # fmt: skip
        reply = server.get(path_of(first, f"/input_items?{query}"))
        assert (reply.status, reply.error["param"]) == (400, name)


def test_responses_are_forgotten(server):
    first = ask(server, "Ho.", stream=False)
    deleted = server.request("DELETE", path_of(first))
    assert deleted.json == {"id": first["id"], "object": "response", "deleted": True}
    for method, more in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        reply = server.request(method, path_of(first, more))
        assert (reply.status, reply.error["code"]) == (404, "response_not_found")
    reply = post(server, previous_response_id=first["id"])
    assert reply.error["code"] == "previous_response_not_found"
    assert server.get("/v1/responses/x?stream=true").status == 400
    assert 'method="DELETE"' in server.get("/metrics").body.decode()


def test_b137_a_response_belongs_to_its_key():
    with LiveServer(api_key=["a", "b"]) as server:
        server.headers = {}
        owner, other = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
        first = post(server, headers=owner).json
        for method, more in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
            assert server.request(method, path_of(first, more), None, other).status == 404
        assert post(server, headers=other, previous_response_id=first["id"]).status == 400
        reference = [{"type": "item_reference", "id": first["output"][0]["id"]}]
        assert post(server, headers=other, input=reference).status == 400
        assert post(server, headers=owner, input=reference).status == 200
        assert server.request("GET", path_of(first), None, owner).json == first


def test_the_next_server_knows_them_if_they_are_in_a_file(tmp_path):
    path = str(tmp_path / "responses.db")
    with LiveServer(response_store=path) as server:
        first = post(server).json
        with pytest.raises(ConfigError, match="response_store"):  # it is one server's own
            make_state(FakeEngine(), ServeArgs(response_store=path))
    with LiveServer(response_store=path) as server:
        assert server.get(path_of(first)).json == first
        assert post(server, previous_response_id=first["id"]).status == 200


def test_a_server_may_keep_none_or_little():
    with LiveServer(response_store_bytes=0) as server:
        response = post(server).json
        assert (response["status"], response["store"]) == ("completed", False)
        assert server.get(path_of(response)).status == 404
    with LiveServer(response_ttl=0.05) as server:
        response = post(server).json
        time.sleep(0.1)
        assert server.get(path_of(response)).status == 404


def test_an_answer_does_not_depend_on_whether_it_can_be_kept():
    with LiveServer() as server:
        post(server)  # it is open now
        server.state.responses._thread.submit(server.state.responses._connection.close).result()
        for stream in (False, True):
            reply = post(server, stream=stream)
            response = response_of(events_of(reply.body)) if stream else reply.json
            assert (response["status"], response["store"]) == ("completed", False)
        server.state.responses._connection = None


def wait_for(server, response, *statuses):
    end = time.monotonic() + 60
    while response["status"] not in statuses:
        assert time.monotonic() < end
        time.sleep(0.01)
        response = server.get(path_of(response)).json
    return response


class Held:
    """An engine's author whose sequences wait for the test."""

    def __init__(self):
        self.num_tokens = 400

    def __call__(self, prompt_token_ids, params):
        return Script([5] * self.num_tokens, step_seconds=0.02)


@pytest.fixture(scope="module")
def slow():
    with LiveServer(FakeEngine(Held(), max_model_len=4096)) as server:
        yield server


def test_a_response_in_the_background(slow):
    slow.engine.author.num_tokens = 20
    begun = post(slow, background=True).json
    assert (begun["status"], begun["background"], begun["output"]) == ("in_progress", True, [])
    reply = post(slow, previous_response_id=begun["id"])
    assert (reply.status, reply.error["param"]) == (400, "previous_response_id")
    done = wait_for(slow, begun, "completed")
    assert done["id"] == begun["id"]
    assert shown(done) == [("message", tiny_tokenizer().decode([5] * 20))]
    assert done["usage"]["output_tokens"] == 21
    # What has ended stays as it is.
    assert slow.post(path_of(begun, "/cancel"), b"").json == done
    assert not slow.state.background


def test_one_that_is_done_at_once(server):
    server.engine.author.text = "Ho"
    response = post(server, background=True).json
    assert (response["status"], shown(response)) == ("completed", [("message", "Ho")])
    assert server.get(path_of(response)).json == response


def test_what_an_engine_refuses_a_little_later_is_refused_in_the_background_too():
    class Busy(FakeEngine):
        async def generate(self, *arguments, **keywords):
            await asyncio.sleep(0.01)
            async for output in super().generate(*arguments, **keywords):
                yield output

    with LiveServer(Busy()) as server:
        reply = post(server, background=True, input="word " * 600)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


def test_a_response_in_the_background_is_cancelled(slow):
    slow.engine.author.num_tokens = 400
    begun = post(slow, background=True).json
    cancelled = slow.post(path_of(begun, "/cancel"), b"").json
    assert cancelled["status"] == "cancelled"
    assert slow.get(path_of(begun)).json == cancelled
    assert not slow.engine.running
    assert slow.state.admission.num_sequences == 0
    waited_for = post(slow, max_output_tokens=1).json
    reply = slow.post(path_of(waited_for, "/cancel"), b"")
    assert (reply.status, reply.error["param"]) == (400, "response_id")


def test_one_that_is_forgotten_is_broken_off(slow):
    slow.engine.author.num_tokens = 400
    begun = post(slow, background=True).json
    assert slow.request("DELETE", path_of(begun)).status == 200
    assert not slow.engine.running
    assert slow.get(path_of(begun)).status == 404


def test_one_that_fails():
    script = Script([5] * 20, FinishReason.ERROR, "it broke.", step_seconds=0.02)
    with LiveServer(FakeEngine(lambda p, s: script)) as server:
        begun = post(server, background=True).json
        failed = wait_for(server, begun, "failed")
        assert failed["error"] == {"code": "server_error", "message": "it broke."}


def test_a_server_that_stops_ends_them(tmp_path):
    path = str(tmp_path / "responses.db")
    with LiveServer(FakeEngine(Held(), max_model_len=4096), response_store=path) as server:
        begun = post(server, background=True).json
        assert begun["status"] == "in_progress"
    with LiveServer(response_store=path) as server:
        ended = server.get(path_of(begun)).json
    assert ended["status"] == "failed"
    assert "stopped" in ended["error"]["message"]


def test_a_client_that_leaves_before_it_knows_of_one_leaves_nothing():
    engine = FakeEngine(lambda p, s: Script([5] * 400, step_seconds=0.02), max_model_len=4096)
    with LiveServer(engine) as server:
        post(server, max_output_tokens=1)
        held = threading.Event()  # both threads that render prompts are busy
        for _ in range(2):
            server.state.text_threads.submit(held.wait, 60)
        connection = server.open("/v1/responses", {"input": "Hi", "background": True})
        server.wait_until(lambda: server.state.admission.num_sequences == 1)
        connection.close()
        server.wait_until(lambda: server.state.admission.num_sequences == 0)
        held.set()
        assert not server.state.background
        assert len(engine.calls) == 1
