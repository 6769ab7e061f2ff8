"""Responses as a client has them in the end, streamed or not; the grammar of the events is checked
on the way.
"""

from __future__ import annotations

import json

from tokenmill.contracts.request import FinishReason

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
NOW = {"type": "function", "name": "now"}
SHELL = {"type": "custom", "name": "sh", "description": "Runs a line."}
TOOLS = [WEATHER, NOW, SHELL]
LS = '<tool_call>\n{"name": "sh", "arguments": {"input": "ls -l"}}\n</tool_call>'
MATHS = {
    "type": "namespace",
    "name": "maths",
    "description": "Sums.",
    "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}, SHELL],
}


def message(role, *parts):
    return {"type": "message", "role": role, "content": list(parts)}


def said(text, kind="input_text"):
    return {"type": kind, "text": text}


def call(call_id, name, arguments, **more):
    item = {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
    return {**item, **more}


def output(call_id, value):
    return {"type": "function_call_output", "call_id": call_id, "output": value}


def post(server, *, headers=None, **fields):
    """The answer to a request that is complete without any fields."""
    return server.post(
        "/v1/responses", {"model": "fake/model", "input": "Hi", **fields}, **(headers or {})
    )


def ask(server, answer="", *, stream, reason=FinishReason.STOP, **fields):
    """The response of a model that says `answer`."""
    says = server.engine.author
    says.text, says.reason = answer, reason
    reply = post(server, stream=stream, **fields)
    assert reply.status == 200, reply.body
    return response_of(events_of(reply.body)) if stream else reply.json


def events_of(body):
    """Data of each event; numbered without a gap, and ended as it must be."""
    *blocks, done = body.decode().split("\n\n")[:-1]
    assert done == "data: [DONE]"
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert event["type"] == name.removeprefix("event: ")
        assert event["sequence_number"] == number
        events.append(event)
    return events


def response_of(events):
    """The response that a stream ends with; everything before it must agree with it."""
    created, in_progress, *events, last = events
    assert [created["type"], in_progress["type"]] == ["response.created", "response.in_progress"]
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    response = last["response"]
    assert last["type"] == f"response.{response['status']}"
    assert created["response"]["id"] == response["id"]
    items = []
    while events:
        item, events = one_item(events, len(items))
        items.append(item)
    assert items == response["output"]
    return response


def one_item(events, index):
    """(the next item, the events behind it)"""
    added, *events = events
    assert added["type"] == "response.output_item.added"
    item = added["item"]
    assert item["status"] == "in_progress"
    kind = {
        "message": "output_text",
        "reasoning": "reasoning_text",
        "function_call": "function_call_arguments",
        "custom_tool_call": "custom_tool_call_input",
    }[item["type"]]
    names = [event["type"].removeprefix("response.") for event in events]
    end = names.index("output_item.done")
    inner, names, done = events[:end], names[:end], events[end]
    has_parts = item["type"] in ("message", "reasoning")
    if has_parts:
        assert [names.pop(0), names.pop()] == ["content_part.added", "content_part.done"]
    assert names.pop() == f"{kind}.done"
    assert set(names) <= {f"{kind}.delta"}
    for event in [added, *inner, done]:
        assert event["output_index"] == index
        assert event.get("item_id", item["id"]) == item["id"]
        assert event.get("content_index", 0) == 0
    assert done["item"]["id"] == item["id"]
    deltas = [event for event in inner if event["type"].endswith(".delta")]
    text = "".join(event["delta"] for event in deltas)
    last = next(event for event in inner if event["type"] == f"response.{kind}.done")
    name = {"function_call": "arguments", "custom_tool_call": "input"}.get(item["type"], "text")
    assert last[name] == text
    if has_parts:
        (part,) = done["item"]["content"]
        assert part["text"] == text
        assert inner[-1]["part"] == part
    else:
        assert done["item"][name] == text
    if item["type"] == "message":
        assert last["logprobs"] == part["logprobs"]
        told = [entry for event in deltas for entry in event["logprobs"]]
        assert told == part["logprobs"][: len(told)]
    return done["item"], events[end + 1 :]


def shown(response):
    """What the items hold, without ids."""
    found = []
    for item in response["output"]:
        if item["type"] in ("message", "reasoning"):
            found.append((item["type"], item["content"][0]["text"]))
        else:
            value = item["arguments"] if item["type"] == "function_call" else item["input"]
            found.append((item["type"], item["name"], value))
    return found
