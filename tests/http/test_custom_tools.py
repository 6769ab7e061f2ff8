"""Custom tools in chats: any text in, by way of a function that the model can call."""

from __future__ import annotations

import json

import openai
import pytest

from helpers.live_server import chunks_of
from helpers.tool_chats import BOTH, NAMED, PARIS, WEATHER, ask, grammar_of, serving
from tokenmill.contracts.request import FinishReason
from tokenmill.entrypoints.parsers.custom_calls import custom_input

SHELL = {"type": "custom", "custom": {"name": "sh", "description": "Runs a line."}}
TOOLS = [WEATHER, SHELL]


def said(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


LS = said("sh", '{"input": "ls -l \\"a\\""}')


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


def calls_of(server, text, *, stream, reason=FinishReason.STOP, **fields):
    """(type, name, text) of each call, and the finish reason."""
    says = server.engine.author
    says.text, says.reason = text, reason
    reply = server.chat(stream=stream, **{"tools": TOOLS, **fields})
    assert reply.status == 200, reply.body
    if not stream:
        (choice,) = reply.json["choices"]
        calls = choice["message"].get("tool_calls", [])
        reason = choice["finish_reason"]
    else:
        calls = []
        for chunk in chunks_of(reply):
            (choice,) = chunk["choices"]
            reason = choice["finish_reason"] or reason
            for piece in choice["delta"].get("tool_calls", []):
                if "id" in piece:
                    assert piece["index"] == len(calls)
                    calls.append(piece)
                else:
                    (kind,) = piece.keys() - {"index"}
                    assert kind == calls[piece["index"]]["type"]
                    for name, more in piece[kind].items():
                        calls[piece["index"]][kind][name] += more
    found = []
    for call in calls:
        kind = call["type"]
        text = call[kind]["arguments" if kind == "function" else "input"]
        found.append((kind, call[kind]["name"], text))
    return found, reason


@BOTH
def test_calls_of_both_kinds(server, stream):
    text = said("sh", '{"input": "a"}') + "\n" + said("get_weather", PARIS) + "\n" + LS
    assert calls_of(server, text, stream=stream) == (
        [("custom", "sh", "a"), ("function", "get_weather", PARIS), ("custom", "sh", 'ls -l "a"')],
        "tool_calls",
    )


@BOTH
@pytest.mark.parametrize(
    "arguments", ['{"line": "ls"}', '{"input": 5}', '{"input": "ls', "{}", '{"input": ""}']
)
def test_what_the_model_writes_instead_is_the_input(server, stream, arguments):
    text = said("sh", arguments)[: None if arguments.endswith("}") else -len("}\n</tool_call>")]
    calls, _ = calls_of(server, text, stream=stream, reason=FinishReason.LENGTH)
    ((kind, name, found),) = calls
    assert (kind, name) == ("custom", "sh")
    assert found == custom_input(arguments)


def test_the_model_sees_a_function_and_the_history_is_its_own(server):
    call = {"id": "c1", "type": "custom", "custom": {"name": "sh", "input": "ls"}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
    ]
    ask(server, "Ho", stream=False, messages=messages, tools=TOOLS)
    prompt = server.engine.calls[-1][0].text
    assert '"name": "sh", "description": "Runs a line.", "parameters": {"type": "object"' in prompt
    assert '<tool_call>{"name": "sh", "arguments": {"input": "ls"}}' in prompt
    for wrong in ({"name": "sh"}, None, {"input": "a"}):
        messages[1]["tool_calls"][0]["custom"] = wrong
        reply = server.chat(messages=messages, tools=TOOLS)
        assert reply.status == 400
        assert reply.error["param"].startswith("messages[1].tool_calls[0].")


@pytest.mark.parametrize(
    ("choice", "sees"),
    [
        ({"type": "custom", "custom": {"name": "sh"}}, ["sh"]),
        ("required", ["sh", "get_weather"]),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [SHELL]},
            },
            ["sh"],
        ),
        (NAMED, ["get_weather"]),
    ],
)
def test_choices(server, choice, sees):
    calls_of(server, LS, stream=False, tool_choice=choice)
    grammar = grammar_of(server)
    for name in ("sh", "get_weather"):
        assert (f'"{name}"' in grammar or f'\\"{name}\\"' in grammar) == (name in sees)


def test_a_form_for_the_input(server):
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
    shell = {"type": "custom", "custom": {"name": "sh", "format": form}}
    calls_of(server, LS, stream=False, tools=[shell])
    assert "[a-z]+" in grammar_of(server)
    calls_of(server, LS, stream=False)
    assert grammar_of(server) is None


def test_the_official_client(server):
    server.engine.author.text = LS
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        fields = {"model": "", "messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
        (call,) = client.chat.completions.create(**fields).choices[0].message.tool_calls
        assert (call.type, call.custom.name, call.custom.input) == ("custom", "sh", 'ls -l "a"')
        chunks = list(client.chat.completions.create(stream=True, **fields))
    assert json.dumps([chunk.model_dump() for chunk in chunks]).count("ls -l") == 1
