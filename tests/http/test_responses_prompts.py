"""POST /v1/responses: the prompt that items and tools become, and what is left out of it."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from helpers.fake_engine import tiny_tokenizer
from helpers.responses import (
    LS,
    MATHS,
    NOW,
    SHELL,
    WEATHER,
    ask,
    call,
    message,
    output,
    post,
    said,
)
from helpers.tool_chats import BOTH, ONE, PARIS
from tokenmill.entrypoints.http.responses.items import ChatItems, checked_items


def chat_call(call_id, name, arguments):
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        (
            {"input": "a", "instructions": "b"},
            [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}],
        ),
        (
            {
                "input": [
                    {"role": "developer", "content": "a"},
                    message("user", said("b"), said("c")),
                    {"role": "assistant", "content": "d"},
                    message("assistant", said("e", "output_text"), said("f", "output_text")),
                    {"role": "user", "content": "g"},
                ]
            },
            [
                {"role": "system", "content": "a"},
                {"role": "user", "content": "b\nc"},
                {"role": "assistant", "content": "d"},
                {"role": "assistant", "content": "ef"},
                {"role": "user", "content": "g"},
            ],
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "a"},
                    {
                        "type": "reasoning",
                        "id": "rs_1",
                        "summary": [said("no", "summary_text")],
                        "content": [said("hm", "reasoning_text")],
                    },
                    message("assistant", said("I look.", "output_text")),
                    call("c1", "now", "{}"),
                    call("c2", "get_weather", PARIS),
                    output("c1", "5"),
                    output("c2", [said("warm"), said("dry")]),
                    {"type": "reasoning", "summary": [said("so", "summary_text")]},
                    call("c3", "now", '{"a": ', status="incomplete"),
                    output("c3", "?"),
                    {
                        "type": "custom_tool_call",
                        "call_id": "c4",
                        "name": "sh",
                        "input": "ls",
                    },
                    {"type": "custom_tool_call_output", "call_id": "c4", "output": "x"},
                ]
            },
            [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": "I look.",
                    "reasoning_content": "hm",
                    "tool_calls": [
                        chat_call("c1", "now", {}),
                        chat_call("c2", "get_weather", json.loads(PARIS)),
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "name": "now", "content": "5"},
                {
                    "role": "tool",
                    "tool_call_id": "c2",
                    "name": "get_weather",
                    "content": "warm\ndry",
                },
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "so",
                    "tool_calls": [chat_call("c3", "now", {})],
                },
                {"role": "tool", "tool_call_id": "c3", "name": "now", "content": "?"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [chat_call("c4", "sh", {"input": "ls"})],
                },
                {"role": "tool", "tool_call_id": "c4", "name": "sh", "content": "x"},
            ],
        ),
    ],
)
def test_items_become_the_messages_of_a_chat(server, fields, chat):
    """The prompt is the one that a chat of these messages has, and results have their names."""
    ask(server, "Ho", stream=False, **fields)
    ids = server.engine.calls[-1][0].token_ids
    assert ids == server.post("/tokenize", {"messages": chat}).json["tokens"]
    items = ChatItems()
    if isinstance(fields["input"], list):
        items.input(checked_items(fields["input"]))
        names = [each.get("name") for each in items.messages]
        assert names == [each.get("name") for each in chat]


def function_of(tool):
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


NAMED = {"type": "function", "function": {"name": "now"}}
ALLOWED = {"mode": "required", "tools": [NAMED]}


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({}, {}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        ({"tool_choice": "none"}, {"tool_choice": "none"}),
        ({"tool_choice": {"type": "function", "name": "now"}}, {"tool_choice": NAMED}),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "now"}],
                }
            },
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}},
        ),
    ],
)
def test_tools_and_choices_are_those_of_a_chat(server, fields, chat):
    ask(server, "Ho", stream=False, tools=[WEATHER, NOW], **fields)
    prompt, params, *_ = server.engine.calls[-1]
    assert server.chat(tools=[function_of(WEATHER), function_of(NOW)], **chat).status == 200
    assert prompt.token_ids == server.engine.calls[-1][0].token_ids
    assert params.structured_outputs == server.engine.calls[-1][1].structured_outputs


def test_a_custom_tool_can_be_named_and_its_text_have_a_form(server):
    shell = {**SHELL, "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}}
    ask(server, LS, stream=False, tools=[shell], tool_choice={"type": "custom", "name": "sh"})
    assert "[a-z]+" in server.engine.calls[-1][1].structured_outputs.grammar


@BOTH
def test_tools_of_a_namespace(server, stream):
    text = ONE.replace("get_weather", "maths.add") + LS.replace('"sh"', '"maths.sh"') + LS
    response = ask(server, text, stream=stream, tools=[SHELL, MATHS])
    assert response["tools"][1] == MATHS
    calls = response["output"]
    assert [(call.get("namespace"), call["name"]) for call in calls] == [
        ("maths", "add"),
        ("maths", "sh"),
        (None, "sh"),
    ]
    assert [call["type"] for call in calls] == ["function_call", *["custom_tool_call"] * 2]
    results = [output(call["call_id"], "5") for call in calls]
    ask(server, "Ho", stream=stream, input=[{"role": "user", "content": "Hi"}, *calls, *results],
        tools=[SHELL, MATHS])  # fmt: skip
    prompt = server.engine.calls[-1][0].text
    for name in ("maths.add", "maths.sh", "sh"):
        assert f'<tool_call>{{"name": "{name}", "arguments": {{' in prompt


def test_effort(server):
    ask(server, "Ho", stream=False, reasoning={"effort": "none"})
    assert server.engine.calls[-1][0].text.rstrip().endswith("<think></think>")


def conversation(num_turns):
    turns = [
        {"role": role, "content": f"{role} {i} " + "word " * 20}
        for i in range(num_turns)
        for role in ("user", "assistant")
    ]
    return [*turns, {"role": "user", "content": "And now?"}]


def test_truncation_leaves_out_the_oldest_turns(plain):
    fields = {"instructions": "Be brief.", "input": conversation(20), "max_output_tokens": 8}
    refused = post(plain, **fields)
    assert (refused.status, refused.error["param"]) == (400, "input")
    assert "set truncation to 'auto'" in refused.error["message"]
    reply = post(plain, **fields, truncation="auto")
    assert reply.json["truncation"] == "auto"
    prompt = plain.engine.calls[-1][0]
    assert 512 - 8 - 80 < len(prompt.token_ids) <= 512 - 8
    text = tiny_tokenizer().decode(prompt.token_ids)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nuser ")
    assert "And now?" in text
    assert "user 19" in text
    assert "user 0" not in text
    # What fits stays as it is, and what never fits is cut.
    short = {**fields, "input": conversation(2)}
    post(plain, **short)
    whole = plain.engine.calls[-1][0].token_ids
    post(plain, **short, truncation="auto")
    assert plain.engine.calls[-1][0].token_ids == whole
    assert post(plain, input="word " * 2_000, truncation="auto").status == 200
    assert post(plain, **fields | {"max_output_tokens": 10**6}, truncation="auto").status == 200


def test_nothing_is_built_of_arguments_that_were_cut_off():
    """They are looked at on the event loop, while others wait."""
    call = {"type": "function_call", "name": "a", "call_id": "1", "status": "incomplete"}
    began = "[" + "1," * 1_000_000
    items = ChatItems()
    tracemalloc.start()
    items.input([{**call, "arguments": began}])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20
    assert items.messages[0]["tool_calls"][0]["function"]["arguments"] == {}
