"""Tools in chats: what is asked for, what is refused, and what the grammar then allows."""

from __future__ import annotations

import time
from functools import partial

import pytest

from helpers.fake_engine import FakeEngine
from helpers.timing import in_time
from helpers.tool_chats import (
    BOTH,
    NAMED,
    ONE,
    PARIS,
    TOOLS,
    WEATHER,
    ask,
    calls_of,
    grammar_of,
    serving,
    tool,
)
from tokenmill.errors import ConfigError


@pytest.fixture(scope="module")
def server():
    with serving(engine={"reasoning_parser": "qwen3"}) as server:
        yield server


def test_b097_tools_count_as_in_tokenize(server):
    messages = [{"role": "user", "content": "Hi"}]
    _, usage = ask(server, "Ho", stream=False, messages=messages, tools=TOOLS)
    count = server.post("/tokenize", {"messages": messages, "tools": TOOLS}).json["count"]
    assert usage["prompt_tokens"] == count
    assert "get_weather" in server.engine.calls[-1][0].text
    none = ask(server, "Ho", stream=False, messages=messages, tools=[])[1]["prompt_tokens"]
    assert none == ask(server, "Ho", stream=False, messages=messages)[1]["prompt_tokens"]


def test_allowed_tools_are_the_only_ones_that_the_model_sees(server):
    for mode in ("auto", "required"):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "now"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        ask(server, ONE, stream=False, tools=TOOLS, tool_choice=choice)
        prompt, params = server.engine.calls[-1][:2]
        assert '"now"' in prompt.text
        assert "get_weather" not in prompt.text
        assert (params.structured_outputs is not None) == (mode == "required")


def custom(**fields):
    return {"type": "custom", "custom": fields}


def function(**fields):
    return {"type": "function", "function": fields}


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [custom(name="a b")]}, "tools[0].custom.name"),
        ({"tools": [custom(name="a", description=5)]}, "tools[0].custom.description"),
        ({"tools": [custom(name="a", format={"type": "x"})]}, "tools[0].custom.format.type"),
        (
            {"tools": [custom(name="a", format={"type": "grammar"})]},
            "tools[0].custom.format.grammar",
        ),
        ({"tools": [WEATHER, {"type": "function"}]}, "tools[1].function"),
        ({"tools": [function(name="")]}, "tools[0].function.name"),
        ({"tools": [function(name=5)]}, "tools[0].function.name"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name"),
        ({"tools": [function(name="a" * 257)]}, "tools[0].function.name"),
        ({"tools": [function(name="a", description=5)]}, "tools[0].function.description"),
        ({"tools": [function(name="a", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [function(name="a", strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ({"tools": [WEATHER] * 1025}, "tools"),
        ({"tools": ["a"]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "x"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": function(name="other")}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "tool_choice.allowed_tools",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"name": "other"}]},
                },
            },
            "tool_choice",
        ),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [tool("a", {"type": 5})], "tool_choice": "required"}, "tools[0]"),
        ({"tools": [tool("a", {"not": {}}, strict=True)]}, "tools[0]"),
    ],
)
def test_b059_what_cannot_be_is_a_400_that_names_the_field(server, fields, parameter):
    for stream in (False, True):
        reply = server.chat(stream=stream, **fields)
        assert reply.status == 400
        assert reply.error["param"] == parameter
    assert server.get("/health").status == 200


DEEP: dict = {"type": "array"}
for _ in range(300):
    DEEP = {"type": "array", "items": DEEP}
WIDE = {"enum": [f"value {i}" for i in range(90_000)]}


@pytest.mark.parametrize(
    "properties",
    [{"a": DEEP}, {"a": WIDE}, {"a": WIDE, "b": WIDE}, {"a": {"const": "x" * 1_000_000}}],
    ids=["deep", "wide", "wider", "long"],
)
def test_b065_schemas_beyond_all_measure(server, properties):
    tools = [tool("f", {"properties": properties})]
    for choice in ("required", "auto"):
        ask_once = partial(server.chat, tools=tools, tool_choice=choice)
        reply = in_time(ask_once, 5, clock=time.process_time)  # client and server
        assert reply.status == 400
        assert reply.error["param"].startswith(("tools", "messages"))
    assert server.get("/health").status == 200


def test_calls_that_are_required_are_all_that_the_grammar_allows(server):
    ask(server, ONE, stream=False, tools=TOOLS, tool_choice="required")
    grammar = grammar_of(server)
    assert all(name in grammar for name in ("get_weather", "now", "add", "<tool_call>"))
    ask(server, ONE, stream=False, tools=TOOLS, tool_choice=NAMED)
    assert "get_weather" in grammar_of(server)
    assert "now" not in grammar_of(server)
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        ask(server, ONE, stream=False, tools=TOOLS, **fields)
        assert grammar_of(server) is None
    strict = tool("now", {"type": "object", "properties": {}}, strict=True)
    ask(server, ONE, stream=False, tools=[WEATHER, strict])
    assert "opening" in grammar_of(server)


def test_b055_either_a_call_or_a_document(server):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for stream in (False, True):
        (choice,), _ = ask(server, "{}", stream=stream, tools=TOOLS, response_format=form)
        assert choice.message == {"content": "{}", "calls": []}
        assert "<tool_call>" in grammar_of(server)
        (choice,), _ = ask(server, ONE, stream=stream, tools=TOOLS, response_format=form)
        assert calls_of(choice) == [("get_weather", PARIS)]
    for fields in ({"structured_outputs": {"regex": "a+"}}, {"guided_choice": ["a", "b"]}):
        reply = server.chat(tools=TOOLS, **fields)
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert server.chat(tools=TOOLS, tool_choice="none", **fields).status == 200
    compact = {"json": {"type": "object"}, "disable_any_whitespace": True}
    reply = server.chat(tools=TOOLS, structured_outputs=compact)
    assert reply.error["param"] == "structured_outputs.disable_any_whitespace"
    ask(server, ONE, stream=False, tools=TOOLS, response_format=form, tool_choice="required")
    assert "<tool_call>" in grammar_of(server)


@BOTH
def test_a_model_whose_calls_nobody_knows_can_be_forced(stream):
    with serving("{{ messages[0].content }}") as server:
        reply = server.chat(tools=TOOLS, stream=stream)
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert "--tool-call-parser" in reply.error["message"]
        text = '[{"name": "get_weather", "parameters": ' + PARIS + "}]"
        (choice,), _ = ask(server, text, stream=stream, tools=TOOLS, tool_choice="required")
        assert calls_of(choice) == [("get_weather", PARIS)]
        assert choice.finish_reason == "tool_calls"
        (choice,), _ = ask(server, text, stream=stream, tools=TOOLS, tool_choice=NAMED)
        assert calls_of(choice) == [("get_weather", PARIS)]
        assert choice.finish_reason == "stop"
        (choice,), _ = ask(server, text, stream=stream, tools=TOOLS, tool_choice="none")
        assert choice.message == {"content": text, "calls": []}


def test_calls_of_the_model_s_own_choice_can_be_switched_off():
    with serving(enable_auto_tool_choice=False) as server:
        reply = server.chat(tools=TOOLS)
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert "--no-enable-auto-tool-choice" in reply.error["message"]
        assert server.chat(tools=TOOLS, tool_choice="required").status == 200


@BOTH
def test_a_parser_that_the_operator_chose(stream):
    with serving("{{ messages[0].content }}", tool_call_parser="pythonic") as server:
        text = '[get_weather(city="Paris"), now()]'
        (choice,), _ = ask(server, text, stream=stream, tools=TOOLS)
        assert calls_of(choice) == [("get_weather", PARIS), ("now", "{}")]
        reply = server.chat(tools=[tool("a", strict=True)])
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert "strict" in reply.error["message"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"tool_call_parser": "hermess"}, "Did you mean 'hermes'"),
        ({"enable_auto_tool_choice": True}, "needs a tool_call_parser"),
        ({"enable_auto_tool_choice": True, "tool_call_parser": "none"}, "needs a tool_call_parser"),
    ],
)
def test_settings_that_cannot_work(args, message):
    from tokenmill.config.serve_args import ServeArgs
    from tokenmill.entrypoints.http.state import make_state

    with pytest.raises(ConfigError, match=message):
        make_state(FakeEngine(), ServeArgs(**args))
