"""Anthropic's Messages as a client has them in the end, streamed or not; the order of events is
checked on the way.
"""

from __future__ import annotations

import json

from helpers.fake_engine import tiny_tokenizer
from tokenmill.contracts.request import FinishReason

HELLO = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
NOW = {"name": "now", "input_schema": {"type": "object"}}
TOOLS = [WEATHER, NOW]
CALL = {"type": "tool_use", "id": "c1", "name": "now", "input": {"zone": "UTC"}}


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def text(value):
    return {"type": "text", "text": value}


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def post(server, *, path="/v1/messages", headers=None, **fields):
    """The answer to a request that is complete without any fields."""
    body = {"model": "fake/model", "max_tokens": 500, "messages": HELLO, **fields}
    return server.post(path, body, **(headers or {}))


def ask(server, text="", *, stream, reason=FinishReason.STOP, **fields):
    """The message that a model answers which says `text`."""
    says = server.engine.author
    says.text, says.reason = text, reason
    reply = post(server, stream=stream, **fields)
    assert reply.status == 200, reply.body
    return message_of(events_of(reply.body)) if stream else reply.json


def events_of(body):
    """(name, data) of each event; strict."""
    assert body.endswith(b"\n\n")
    events = []
    for block in body.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert events[-1][1]["type"] == events[-1][0]
    return events


def message_of(events):
    """The message that a stream amounts to."""
    (first, start), *events = [each for each in events if each[0] != "ping"]
    assert first == "message_start"
    message = start["message"]
    assert message["content"] == []
    is_open, ended = False, False
    for name, data in events:
        assert not ended
        if name == "content_block_start":
            assert not is_open
            assert data["index"] == len(message["content"])
            block, is_open = data["content_block"], True
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = ""
            message["content"].append(block)
        elif name == "content_block_delta":
            assert is_open
            assert data["index"] == len(message["content"]) - 1
            add_delta(message["content"][-1], data["delta"])
        elif name == "content_block_stop":
            assert is_open
            assert data["index"] == len(message["content"]) - 1
            is_open = False
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads(message["content"][-1]["input"])
        elif name == "message_delta":
            assert not is_open
            message |= {key: data["delta"][key] for key in ("stop_reason", "stop_sequence")}
            message["usage"] |= data["usage"]
        else:
            assert name == "message_stop"
            ended = True
    assert ended
    return message


def add_delta(block, delta):
    name = {
        "text_delta": "text",
        "thinking_delta": "thinking",
        "input_json_delta": "partial_json",
        "signature_delta": "signature",
    }[delta["type"]]
    block["input" if name == "partial_json" else name] += delta[name]


def prompt_of(server):
    """The text of the latest prompt."""
    call = server.engine.calls[-1][0]
    return call.text or tiny_tokenizer().decode(call.token_ids)


def blocks_of(message):
    """What the blocks hold, without ids."""
    shown = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [
        (block["type"], block.get("name"), block[shown[block["type"]]])
        for block in message["content"]
    ]
