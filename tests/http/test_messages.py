"""POST /v1/messages, POST /v1/messages/count_tokens: Anthropic's protocol, field by field."""

from __future__ import annotations

import json

import pytest

from helpers.fake_engine import FakeEngine, Script
from helpers.live_server import LiveServer
from helpers.messages import (
    CALL,
    HELLO,
    NOW,
    TOOLS,
    ask,
    assistant,
    blocks_of,
    events_of,
    message_of,
    post,
    text,
    user,
)
from helpers.tool_chats import BOTH, ONE, PARIS, TWO
from tokenmill.contracts.request import FinishReason
from tokenmill.engine.serve_options import ServeOptions
from tokenmill.errors import CheckpointError


@BOTH
def test_a_message(server, stream):
    message = ask(server, "Ho ho.", stream=stream)
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["model"] == "fake/model"
    assert blocks_of(message) == [("text", None, "Ho ho.")]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    usage = message["usage"]
    assert usage["input_tokens"] == len(server.engine.calls[-1][0].token_ids)
    assert usage["output_tokens"] > 1
    assert usage["cache_read_input_tokens"] == usage["cache_creation_input_tokens"] == 0


@BOTH
def test_a_model_without_marks(plain, stream):
    reply = post(plain, stream=stream)
    message = message_of(events_of(reply.body)) if stream else reply.json
    assert blocks_of(message) == [("text", None, "user\nHi\nassistant\n")]
    assert message["usage"]["output_tokens_details"] is None


@BOTH
@pytest.mark.parametrize(
    ("text", "blocks", "reason"),
    [
        ("", [], "end_turn"),
        (
            "<think>Two.</think>" + TWO + " Bye.",
            [
                ("thinking", None, "Two."),
                ("text", None, "I look."),
                ("tool_use", "get_weather", json.loads(PARIS)),
                ("tool_use", "now", {}),
                ("text", None, "Bye."),
            ],
            "tool_use",
        ),
        ("<think>Hm.</think>", [("thinking", None, "Hm.")], "end_turn"),
    ],
)
def test_blocks(server, text, blocks, reason, stream):
    message = ask(server, text, stream=stream, tools=TOOLS)
    # Blank space between two blocks belongs to neither.
    found = [(*rest, value.strip() if isinstance(value, str) else value)
             for *rest, value in blocks_of(message)]  # fmt: skip
    assert found == blocks
    assert message["stop_reason"] == reason
    calls = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    assert len(set(calls)) == len(calls)
    for block in message["content"]:
        assert block["type"] != "thinking" or block["signature"]


@BOTH
def test_why_a_message_ends(server, stream):
    cut = ask(server, "One two three four", stream=stream, max_tokens=2)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    assert cut["usage"]["output_tokens"] == 2
    stopped = ask(server, "One two three", stream=stream, stop_sequences=["wo", "x"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "wo")
    assert blocks_of(stopped) == [("text", None, "One t")]
    with LiveServer(FakeEngine(max_model_len=32)) as small:
        reply = post(small, stream=stream, max_tokens=500)
        message = message_of(events_of(reply.body)) if stream else reply.json
        assert message["stop_reason"] == "model_context_window_exceeded"
        room = message["usage"]["output_tokens"]
        reply = post(small, stream=stream, max_tokens=room)  # both ends are one
        message = message_of(events_of(reply.body)) if stream else reply.json
    assert message["stop_reason"] == "max_tokens"


def test_a_call_that_is_cut_off_has_no_input(server):
    message = ask(server, ONE[:-25], stream=False, tools=TOOLS, reason=FinishReason.LENGTH)
    assert blocks_of(message) == [("tool_use", "get_weather", {})]
    assert message["stop_reason"] == "max_tokens"


@BOTH
def test_max_tokens_0_reads_the_prompt_and_says_nothing(server, stream):
    message = ask(server, "Ho", stream=stream, max_tokens=0)
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    assert message["usage"]["output_tokens"] == 0
    assert message["usage"]["input_tokens"] > 0


def test_events_come_with_names_and_a_ping(server):
    server.engine.author.text = "Ho"
    reply = post(server, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    names = [name for name, _ in events_of(reply.body)]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert b"[DONE]" not in reply.body


def test_silence_is_filled_with_pings():
    slow = FakeEngine(lambda prompt, params: Script([5], first_step_seconds=0.4))
    with LiveServer(slow, stream_keep_alive=0.05) as server:
        events = events_of(post(server, stream=True).body)
    assert [name for name, _ in events][:2] == ["ping", "ping"]
    assert message_of(events)["stop_reason"] == "end_turn"


def test_a_stream_that_fails_ends_with_an_error():
    failing = FakeEngine(lambda p, s: Script([5, 6], FinishReason.ERROR, "it broke."))
    with LiveServer(failing) as server:
        reply = post(server, stream=True)
        whole = post(server)
    name, data = events_of(reply.body)[-1]
    assert (name, data["error"]["type"]) == ("error", "api_error")
    assert data["error"]["message"] == "it broke."
    assert data["request_id"] == reply.headers["x-request-id"]
    assert (whole.status, whole.error["type"]) == (500, "api_error")


def nested(depth):
    """A document in a document in a ..."""
    document = text("a")
    for _ in range(depth):
        document = {"type": "document", "source": {"type": "content", "content": [document]}}
    return document


def test_sampling_fields(server):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "stop_sequences": ["x"],
        "seed": 3,
    }
    ask(server, "Ho", stream=False, **fields, priority=2, cache_salt="s", timeout=30)
    _, params, priority, salt, deadline = server.engine.calls[-1]
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    assert (params.stop, params.seed, params.max_tokens) == (["x"], 3, 500)
    assert (priority, salt, deadline) == (2, "s", 30)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_a_form_for_the_answer(server, fields):
    ask(server, "{}", stream=False, **fields)
    assert json.loads(server.engine.calls[-1][1].structured_outputs.source) == SCHEMA


def test_what_agents_send_besides_is_accepted(server):
    server.engine.author.text = "Ho"
    reply = post(
        server,
        path="/v1/messages?beta=true",
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "who-knows-2027-01-01"},
        metadata={"user_id": "u"},
        service_tier="auto",
        container=None,
        mcp_servers=[],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        cache_control={"type": "ephemeral"},
        speed="fast",
    )
    assert reply.status == 200


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [user()]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [*HELLO, user("a")]}, "messages[1].content[0]"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [user({"type": "server_tool_use"})]}, "messages[0].content[0].type"),
        ({"messages": [assistant({"type": "image"})]}, "messages[0].content[0].type"),
        ({"messages": [*HELLO, assistant({**CALL, "input": 5})]}, "messages[1].content[0].input"),
        ({"messages": [*HELLO, assistant(CALL)]}, "messages[1]"),
        ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [user({"type": "document", "source": {"type": "base64"}})]},
            "messages[0].content[0].source.type",
        ),
        ({"messages": [user(nested(2))]}, "messages[0].content[0].source.content[0].type"),
        ({"messages": [user(nested(300))]}, "messages[0].content[0].source.content[0].type"),
        (
            {"messages": [user({"type": "image", "source": {"type": "file"}})]},
            "messages[0].content[0].source.type",
        ),
        (
            {
                "system": "a",
                "messages": [
                    *HELLO,
                    user(
                        text("b"),
                        {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}},
                    ),
                ],
            },
            "messages[1].content[1].type",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [NOW, {"name": "a"}]}, "tools[1].input_schema"),
        ({"tools": [NOW, {"name": "a b", "input_schema": {}}]}, "tools[1].name"),
        ({"tools": [NOW, NOW]}, "tools[1]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2**60}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "json"}}}, "output_config.format"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.schema",
        ),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
    ],
)
@BOTH
def test_what_is_wrong_is_a_400_that_names_the_field(server, fields, place, stream):
    reply = post(server, stream=stream, **fields)
    assert reply.status == 400, reply.body
    error = reply.error
    assert (reply.json["type"], error["type"]) == ("error", "invalid_request_error")
    assert error["details"]["param"] == place
    assert error["message"].startswith((place, "`", place.partition("[")[0]))


def test_a_prompt_that_is_too_long_is_a_400_in_a_stream_as_well(plain):
    for content in ("word " * 600, "x" * 100_000):
        reply = post(plain, stream=True, messages=[{"role": "user", "content": content}])
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
        assert reply.error["details"] == {
            "error_code": "context_length_exceeded",
            "param": "messages",
        }
        assert "truncate_prompt_tokens" not in reply.error["message"]  # no field of the protocol


def test_other_errors_have_their_types():
    slow = FakeEngine(lambda prompt, params: Script([5], first_step_seconds=0.5), max_num_seqs=1)
    with LiveServer(slow, api_key=["k"], max_body_bytes=2_000, request_timeout=0.2) as server:
        wrong = post(server, headers={"authorization": "Bearer x"})
        assert (wrong.status, wrong.error["type"]) == (401, "authentication_error")
        assert post(server, headers={"authorization": "", "x-api-key": "k"}).status == 504
        late = post(server)
        assert (late.status, late.error["type"]) == (504, "timeout_error")
        assert late.headers["request-id"] == late.json["request_id"]
        other = post(server, model="claude")
        assert (other.status, other.error["type"]) == (404, "not_found_error")
        missing = server.post("/v1/messages/batches", {})
        assert (missing.status, missing.error["type"]) == (404, "not_found_error")
        assert server.get("/v1/messages").error["type"] == "invalid_request_error"
        large = post(server, system="x" * 3_000)
        assert (large.status, large.error["type"]) == (413, "request_too_large")
        junk = server.post("/v1/messages", b"{")
        assert (junk.status, junk.error["type"]) == (400, "invalid_request_error")
        server.state.draining = True
        closed = post(server)
        assert (closed.status, closed.error["type"]) == (529, "overloaded_error")
        assert closed.headers["retry-after"] == "1"
        # On other paths nothing has changed.
        assert server.complete().status == 503
        assert server.complete().error["code"] == "unavailable"
        server.state.draining = False


def test_b085_a_full_queue_is_a_429():
    slow = FakeEngine(lambda prompt, params: Script([5]), max_num_seqs=1)
    with LiveServer(slow, options=ServeOptions(max_queue=0)) as server:
        with server.state.admission.entered(1, "n"):
            full = post(server)
        assert (full.status, full.error["type"]) == (429, "rate_limit_error")
        assert 1 <= int(full.headers["retry-after"]) <= 60
        assert post(server).status == 200


def test_unforeseen_errors_tell_nothing():
    def fail(prompt, params):
        raise CheckpointError("a secret") if params.max_tokens == 1 else ValueError("a secret")

    with LiveServer(FakeEngine(fail)) as server:
        reply = post(server)
        assert (reply.status, reply.error["type"]) == (500, "api_error")
        assert "secret" not in reply.body.decode()


def test_cached_tokens_are_told_only_if_the_server_may():
    with LiveServer(enable_prompt_tokens_details=True) as server:
        usage = post(server, system="a word " * 20).json["usage"]
        total = len(server.engine.calls[-1][0].token_ids)
    assert usage["cache_read_input_tokens"] == total // 16 * 16 > 0
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == total


def count(server, **fields):
    body = {"model": "fake/model", "messages": HELLO, **fields}
    return server.post("/v1/messages/count_tokens?beta=true", body)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief."},
        {"tools": TOOLS},
        {"thinking": {"type": "disabled"}},
        {"messages": [*HELLO, assistant(text("Hel"))]},
    ],
)
def test_tokens_are_counted_as_they_will_be_read(server, fields):
    message = ask(server, "Ho", stream=False, **fields)
    assert count(server, **fields).json == {"input_tokens": message["usage"]["input_tokens"]}


def test_counting_refuses_what_a_message_would(server):
    reply = count(server, messages=[])
    assert (reply.status, reply.error["details"]["param"]) == (400, "messages")
    assert count(server, model="claude").status == 404


def test_both_are_counted_in_the_metrics(server):
    ask(server, "Ho", stream=False)
    count(server)
    metrics = server.get("/metrics").body.decode()
    assert 'handler="/v1/messages"' in metrics
    assert 'handler="/v1/messages/count_tokens"' in metrics


def test_b127_huge_wishes_are_refused_at_once():
    with LiveServer() as server:
        for fields in (
            {"messages": HELLO * 60_000},
            {"messages": [user(*[text("a")] * 60_000)]},
            {"system": [text("a")] * 60_000},
            {"tools": [NOW] * 60_000},
            {"stop_sequences": ["x"] * 100_000},
            {"max_tokens": 10**12},
        ):
            assert post(server, **fields).status == 400, fields.keys()
        assert not server.engine.calls
        assert post(server).status == 200
