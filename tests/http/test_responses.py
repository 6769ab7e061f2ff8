"""POST /v1/responses: items in, items out, field by field and event by event."""

from __future__ import annotations

import json

import pytest

from helpers.fake_engine import FakeEngine, Script
from helpers.live_server import LiveServer
from helpers.responses import (
    LS,
    MATHS,
    NOW,
    SHELL,
    TOOLS,
    ask,
    call,
    events_of,
    message,
    output,
    post,
    response_of,
    said,
    shown,
)
from helpers.tool_chats import BOTH, ONE, PARIS
from tokenmill.contracts.request import FinishReason
from tokenmill.engine.serve_options import ServeOptions


@BOTH
def test_a_response(server, stream):
    response = ask(
        server,
        "Ho ho.",
        stream=stream,
        instructions="Be brief.",
        temperature=0.5,
        metadata={"a": "b"},
        user="u",
        prompt_cache_key="k",
        reasoning={"effort": "low"},
        text={"verbosity": "low"},
    )
    assert response["id"].startswith("resp_")
    assert (response["object"], response["status"]) == ("response", "completed")
    assert response["completed_at"] >= response["created_at"]
    (item,) = response["output"]
    assert item["id"].startswith("msg_")
    assert (item["role"], item["status"]) == ("assistant", "completed")
    part = {"type": "output_text", "text": "Ho ho.", "annotations": [], "logprobs": []}
    assert item["content"] == [part]
    usage = response["usage"]
    assert usage["input_tokens"] == len(server.engine.calls[-1][0].token_ids)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    repeated = {
        "model": "fake/model",
        "instructions": "Be brief.",
        "temperature": 0.5,
        "top_p": 1.0,
        "metadata": {"a": "b"},
        "user": "u",
        "prompt_cache_key": "k",
        "reasoning": {"effort": "low", "summary": None},
        "text": {"verbosity": "low", "format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "parallel_tool_calls": True,
        "truncation": "disabled",
        "background": False,
        "store": True,
        "error": None,
        "incomplete_details": None,
        "previous_response_id": None,
    }
    assert {name: response[name] for name in repeated} == repeated


@BOTH
def test_a_model_without_marks(plain, stream):
    reply = post(plain, stream=stream)
    response = response_of(events_of(reply.body)) if stream else reply.json
    assert shown(response) == [("message", "user\nHi\nassistant\n")]


@BOTH
def test_items(server, stream):
    text = f"<think>Two.</think>I look. {ONE}\n{LS}"
    response = ask(server, text, stream=stream, tools=TOOLS)
    assert shown(response) == [
        ("reasoning", "Two."),
        ("message", "I look."),
        ("function_call", "get_weather", PARIS),
        ("custom_tool_call", "sh", "ls -l"),
    ]
    ids = [item["id"] for item in response["output"]]
    assert [id.partition("_")[0] for id in ids] == ["rs", "msg", "fc", "ctc"]
    assert len(set(ids)) == 4
    calls = [item["call_id"] for item in response["output"][2:]]
    assert len(set(calls)) == 2
    assert response["status"] == "completed"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert response["tools"][1] == {**NOW, "description": None, "parameters": None, "strict": None}


@BOTH
def test_an_empty_answer_has_no_items(server, stream):
    response = ask(server, "", stream=stream)
    assert (response["output"], response["status"]) == ([], "completed")


@BOTH
def test_an_answer_that_is_cut_off_is_incomplete(server, stream):
    response = ask(server, "One two three", stream=stream, max_output_tokens=2)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["max_output_tokens"] == 2
    reason = FinishReason.LENGTH
    cut = ask(server, "Hm. " + ONE[:-25], stream=stream, reason=reason, tools=TOOLS)
    assert [item["status"] for item in cut["output"]] == ["completed", "incomplete"]
    assert PARIS.startswith(cut["output"][1]["arguments"])


@BOTH
def test_a_custom_call_that_is_no_json_has_what_the_model_wrote(server, stream):
    text = LS.replace('{"input": "ls -l"}', '{"line": "ls"}')
    response = ask(server, text, stream=stream, tools=TOOLS)
    assert shown(response) == [("custom_tool_call", "sh", '{"line": "ls"}')]


def test_a_stream_that_fails_ends_with_a_response_that_has_failed():
    failing = FakeEngine(lambda p, s: Script([5, 6], FinishReason.ERROR, "it broke."))
    with LiveServer(failing) as server:
        *_, last = events_of(post(server, stream=True).body)
        whole = post(server)
        response = last["response"]
        kept = server.get(f"/v1/responses/{response['id']}").json
    assert (last["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"] == {"code": "server_error", "message": "it broke."}
    assert response["output"][0]["status"] == "incomplete"
    assert kept == response
    assert (whole.status, whole.error["message"]) == (500, "it broke.")


def test_a_failed_response_has_all_the_text_there_was(server):
    says = server.engine.author
    says.text, says.reason = "Ho <tool_", FinishReason.ERROR  # maybe the beginning of a call
    *_, last = events_of(post(server, stream=True, tools=TOOLS).body)
    assert (last["type"], shown(last["response"])) == ("response.failed", [("message", "Ho <tool")])


@BOTH
def test_log_probabilities(server, stream):
    for fields in (
        {"include": ["message.output_text.logprobs"]},
        {"top_logprobs": 2},
        {"top_logprobs": 2, "include": ["reasoning.encrypted_content"]},
    ):
        response = ask(server, "<think>Hm.</think>Ho ho.", stream=stream, **fields)
        entries = response["output"][1]["content"][0]["logprobs"]
        assert "".join(entry["token"] for entry in entries).startswith("Ho ho.")
        assert {len(entry["top_logprobs"]) for entry in entries} == {fields.get("top_logprobs", 0)}


@BOTH
def test_log_probabilities_of_a_model_without_marks(plain, stream):
    reply = post(plain, stream=stream, top_logprobs=1)
    response = response_of(events_of(reply.body)) if stream else reply.json
    entries = response["output"][0]["content"][0]["logprobs"]
    assert len(entries) == response["usage"]["output_tokens"]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, "json_object"),
        ({"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, "json"),
    ],
)
def test_forms_of_the_answer(server, form, kind):
    response = ask(server, "{}", stream=False, text={"format": form})
    params = server.engine.calls[-1][1].structured_outputs
    assert (params and params.kind) == kind
    assert kind != "json" or json.loads(params.source) == SCHEMA
    assert response["text"]["format"] == form


def test_sampling_fields(server):
    ask(
        server,
        "Ho",
        stream=False,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        max_output_tokens=20,
        seed=3,
        priority=2,
        cache_salt="s",
        timeout=30,
    )
    _, params, priority, salt, deadline = server.engine.calls[-1]
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)
    assert (params.max_tokens, params.seed, priority, salt, deadline) == (20, 3, 2, "s", 30)


def test_what_clients_send_besides_is_accepted(server):
    server.engine.author.text = "Ho"
    reply = post(
        server,
        include=["reasoning.encrypted_content"],
        service_tier="auto",
        safety_identifier="x",
        stream_options={"include_obfuscation": False},
        max_tool_calls=3,
        conversation=None,
        prompt=None,
        context_management=[{"type": "compaction"}],
    )
    assert reply.status == 200


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a"]}, "input[0]"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "a", "id": 5}]}, "input[0].id"),
        ({"input": [message("user", "a")]}, "input[0].content[0].type"),
        ({"input": [message("user", {"type": "input_file"})]}, "input[0].content[0].type"),
        (
            {"input": [message("user", {"type": "input_image", "file_id": "f"})]},
            "input[0].content[0].image_url",
        ),
        (
            {
                "instructions": "a",
                "input": [
                    {"role": "user", "content": "b"},
                    message("user", said("c"), {"type": "input_image", "image_url": "http://x"}),
                ],
            },
            "input[1].content[1].type",
        ),
        ({"input": [call("c", "now", "{")]}, "input[0].arguments"),
        ({"input": [call("c", "now", 5)]}, "input[0].arguments"),
        ({"input": [call(None, "now", "{}")]}, "input[0].call_id"),
        ({"input": [output("c", 5)]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "summary": ["a"]}]}, "input[0].summary[0].text"),
        ({"input": [{"id": "msg_unknown"}]}, "input[0].id"),
        ({"input": [{}]}, "input[0].id"),
        ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [NOW, {"type": "function", "name": "a b"}]}, "tools[1].name"),
        ({"tools": [MATHS, {"type": "function", "name": "a b"}]}, "tools[1].name"),
        ({"tools": [NOW, {**MATHS, "name": "a b"}]}, "tools[1].tools[0].name"),
        ({"tools": [{**MATHS, "tools": [NOW, NOW]}]}, "tools[0].tools[1]"),
        ({"tools": [{**MATHS, "tools": [{"type": "x", "name": "a"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{**MATHS, "tools": 5}]}, "tools[0]"),
        ({"tools": [{**MATHS, "tools": [5]}]}, "tools[0].tools[0]"),
        ({"tools": [{**NOW, "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{**SHELL, "format": {"type": "x"}}]}, "tools[0].format.type"),
        (
            {"tools": [{**SHELL, "format": {"type": "grammar", "syntax": "lark"}}]},
            "tools[0].format",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "sh"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "x"}],
                },
            },
            "tool_choice.tools[0]",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 10**6}, "top_logprobs"),
        ({"truncation": "middle"}, "truncation"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "store"),
        ({"background": True, "stream": True}, "stream"),
    ],
)
@BOTH
def test_what_is_wrong_is_a_400_that_names_the_field(server, fields, place, stream):
    reply = post(server, **{"stream": stream, **fields})
    assert reply.status == 400, reply.body
    assert reply.error["param"] == place
    assert reply.error["type"] == "invalid_request_error"


def test_a_response_that_is_not_there_any_more_has_a_code_of_its_own(server):
    assert post(server, previous_response_id="x").error["code"] == "previous_response_not_found"


def test_a_prompt_that_is_too_long_is_a_400_in_every_mode(plain):
    for text in ("word " * 600, "x" * 100_000):
        for fields in ({}, {"stream": True}, {"background": True}):
            reply = post(plain, input=text, **fields)
            assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


def test_b085_a_full_queue_is_a_429_in_every_mode():
    slow = FakeEngine(lambda prompt, params: Script([5]), max_num_seqs=1)
    with LiveServer(slow, options=ServeOptions(max_queue=0)) as server:
        with server.state.admission.entered(1, "n"):
            for fields in ({}, {"stream": True}, {"background": True}):
                reply = post(server, **fields)
                assert (reply.status, reply.error["code"]) == (429, "queue_full")
                assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert post(server).status == 200


def test_cached_tokens_are_told_only_if_the_server_may():
    with LiveServer(enable_prompt_tokens_details=True) as server:
        usage = post(server, instructions="a word " * 20).json["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    assert cached == usage["input_tokens"] // 16 * 16 > 0


def test_tokens_are_counted_as_they_will_be_read(server):
    for fields in ({}, {"instructions": "a"}, {"tools": TOOLS}, {"reasoning": {"effort": "none"}}):
        response = ask(server, "Ho", stream=False, **fields)
        body = {"model": "fake/model", "input": "Hi", **fields}
        count = server.post("/v1/responses/input_tokens", body).json
        assert count == {
            "object": "response.input_tokens",
            "input_tokens": response["usage"]["input_tokens"],
        }
    assert server.post("/v1/responses/input_tokens", {"input": []}).status == 400
    assert server.post("/v1/responses/input_tokens", {"input": "a", "model": "x"}).status == 404


def test_b127_huge_wishes_are_refused_at_once():
    with LiveServer() as server:
        for fields in (
            {"input": [{"role": "user", "content": "a"}] * 60_000},
            {"input": [message("user", *[said("a")] * 60_000)]},
            {"tools": [NOW] * 60_000},
            {"metadata": {str(i): "" for i in range(100_000)}},
            {"max_output_tokens": 10**12},
            {"top_logprobs": 10**6},
        ):
            assert post(server, **fields).status == 400, fields.keys()
        assert not server.engine.calls
        assert post(server).status == 200
