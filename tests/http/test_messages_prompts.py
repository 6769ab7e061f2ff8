"""POST /v1/messages: the prompt that turns, tools and thinking become, and what is left out."""

from __future__ import annotations

import pytest

from helpers.messages import (
    CALL,
    HELLO,
    TOOLS,
    ask,
    assistant,
    blocks_of,
    post,
    prompt_of,
    text,
    user,
)
from helpers.tool_chats import ONE, TWO
from tokenmill.entrypoints.http.messages.turns import ChatTurns

SYSTEM = "x-anthropic-billing-header: cc_version=2.1; cch={};"


@pytest.mark.parametrize(
    "system",
    [
        "Be brief.",
        [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        SYSTEM.format("ab12") + "\nBe brief.",
        [{"type": "text", "text": SYSTEM.format("7f")}, {"type": "text", "text": "Be brief."}],
    ],
)
def test_the_system_prompt_and_no_line_that_always_changes(server, system):
    ask(server, "Ho", stream=False, system=system)
    assert prompt_of(server).startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_a_system_prompt_of_such_a_line_alone_is_none(server):
    ask(server, "Ho", stream=False, system=SYSTEM.format("1"))
    assert prompt_of(server).startswith("<|im_start|>user\n")


def test_such_a_line_is_not_looked_for_behind_any_number_of_blanks():
    for blanks, kept in (("\n ", "Be brief."), (" " * 1_000, " " * 1_000 + SYSTEM + "\nBe brief.")):
        turns = ChatTurns()
        turns.system(f"{blanks}{SYSTEM}\nBe brief.")
        assert turns.messages == [{"role": "system", "content": kept}]


def result(call_id, content=None, **more):
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


@pytest.mark.parametrize(
    ("messages", "chat"),
    [
        (
            [user(text("a"), text("b")), {"role": "user", "content": "c"}],
            [{"role": "user", "content": "a\nb\nc"}],
        ),
        (
            [
                user(text("a")),
                assistant(
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    text("I look."),
                    CALL,
                ),
                user(result("c1", "5"), text("and?")),
            ],
            [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": "I look.",
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "now", "arguments": {"zone": "UTC"}},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "name": "now", "content": "5"},
                {"role": "user", "content": "and?"},
            ],
        ),
        (
            [user(result("c9", [text("a"), text("b")]), result("c8", is_error=True), result("c7"))],
            [
                {"role": "tool", "tool_call_id": "c9", "content": "a\nb"},
                {"role": "tool", "tool_call_id": "c8", "content": "Error"},
                {"role": "tool", "tool_call_id": "c7", "content": ""},
            ],
        ),
        (
            [
                user(
                    {
                        "type": "document",
                        "title": "T",
                        "source": {"type": "text", "media_type": "text/plain", "data": "D"},
                    },
                    {"type": "document", "source": {"type": "content", "content": "E"}},
                    {
                        "type": "search_result",
                        "title": "S",
                        "source": "s.org",
                        "content": [text("F")],
                    },
                ),
                {"role": "system", "content": "be quick"},
                user(text("go")),
            ],
            [
                {"role": "user", "content": "T\nD\nE\nS\ns.org\nF"},
                {"role": "system", "content": "be quick"},
                {"role": "user", "content": "go"},
            ],
        ),
    ],
)
def test_turns_become_the_messages_of_a_chat(server, messages, chat):
    """The prompt is the one that a chat of these messages has."""
    turns = ChatTurns()
    turns.turns(messages)
    assert turns.messages == chat
    ask(server, "Ho", stream=False, messages=messages)
    ids = server.engine.calls[-1][0].token_ids
    assert ids == server.post("/tokenize", {"messages": chat}).json["tokens"]


def test_a_turn_of_the_assistant_at_the_end_is_continued(server):
    message = ask(server, "lo.", stream=False, messages=[*HELLO, assistant(text("Hel"))])
    assert prompt_of(server).endswith("<|im_start|>assistant\nHel")
    assert blocks_of(message) == [("text", None, "lo.")]


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        (None, {}),
        ({"type": "auto"}, {}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"parallel_tool_calls": False}),
        ({"type": "any"}, {"tool_choice": "required"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"type": "tool", "name": "now"},
            {"tool_choice": {"type": "function", "function": {"name": "now"}}},
        ),
        ({"type": "none"}, {"tool_choice": "none"}),
    ],
)
def test_tools_and_choices_are_those_of_a_chat(server, choice, fields):
    ask(server, ONE, stream=False, tools=TOOLS, tool_choice=choice)
    prompt, params, *_ = server.engine.calls[-1]
    functions = [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "parameters": tool["input_schema"],
                **({"description": tool["description"]} if "description" in tool else {}),
            },
        }
        for tool in TOOLS
    ]
    chat = server.chat(tools=functions, max_tokens=500, **fields)
    assert chat.status == 200
    assert prompt.token_ids == server.engine.calls[-1][0].token_ids
    assert params.structured_outputs == server.engine.calls[-1][1].structured_outputs


def test_one_call_at_most(server):
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    for stream in (False, True):
        message = ask(server, TWO, stream=stream, tools=TOOLS, tool_choice=choice)
        assert [each[:2] for each in blocks_of(message)] == [
            ("text", None),
            ("tool_use", "get_weather"),
        ]


def test_a_forced_call_is_a_reason_to_stop(server):
    message = ask(
        server, ONE, stream=False, tools=TOOLS, tool_choice={"type": "tool", "name": "get_weather"}
    )
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("thinking", "opened", "budget"),
    [
        (None, "", None),
        ({"type": "enabled", "budget_tokens": 1024}, "<think>", 1024),
        ({"type": "adaptive"}, "<think>", None),
        ({"type": "disabled"}, "<think></think>", None),
    ],
)
def test_thinking(server, thinking, opened, budget):
    ask(server, "Ho", stream=False, thinking=thinking)
    end = prompt_of(server).rpartition("<|im_start|>assistant\n")[2]
    assert end.strip() == opened
    assert server.engine.calls[-1][1].thinking_token_budget == budget


def test_thinking_can_be_left_out_and_does_not_matter_to_other_models(server, plain):
    thinking = {"type": "adaptive", "display": "omitted"}
    for stream in (False, True):
        message = ask(server, "Hm.</think>Ho", stream=stream, thinking=thinking)
        assert blocks_of(message) == [("text", None, "Ho")]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert post(plain, thinking=thinking).status == 200


def test_variables_of_the_template_are_the_client_s(server):
    variables = {"enable_thinking": False}
    ask(server, "Ho", stream=False, thinking={"type": "adaptive"}, chat_template_kwargs=variables)
    assert "<think></think>" in prompt_of(server)
