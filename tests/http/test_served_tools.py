"""Calls of a real model through a real engine: whatever it would rather say, arguments parse."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest

from helpers.default_model import default_model_path
from helpers.serve_process import ServeProcess

pytestmark = [pytest.mark.model, pytest.mark.slow]

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "kelvin"]},
        "days": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "note": {"anyOf": [{"$ref": "#/$defs/note"}, {"type": "null"}]},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
    "$defs": {"note": {"type": "object", "properties": {"ok": {"type": "boolean"}}}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASKED = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]


@pytest.fixture(scope="module", params=["hermes", "none"])
def client(request):
    family = ("--tool-call-parser", request.param)
    with ServeProcess(*family, model=default_model_path(), num_kv_blocks=512) as process:
        url = f"http://127.0.0.1:{process.client().port}/v1"
        with openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=300) as client:
            yield client


def ask(client, seed, **fields):
    fields = {"seed": seed, "temperature": 1, "max_tokens": 400, "tools": TOOLS, **fields}
    return client.chat.completions.create(model="", messages=ASKED, **fields)


def streamed(client, seed, **fields):
    """(message, finish reason) of a stream, put together by hand."""
    calls, content, reason = [], "", None
    for chunk in ask(client, seed, stream=True, **fields):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for piece in choice.delta.tool_calls or []:
            if piece.id is not None:
                assert piece.index == len(calls)
                calls.append([piece.function.name, ""])
            calls[piece.index][1] += piece.function.arguments
        reason = choice.finish_reason
    return calls, content, reason


@pytest.mark.parametrize(
    ("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"]
)
def test_b050_forced_calls_fit_their_schemas(client, choice, reason):
    validator = jsonschema.Draft202012Validator(WEATHER)
    fields = {"tool_choice": choice, "parallel_tool_calls": False}
    for seed in range(5):
        whole = ask(client, seed, **fields).choices[0]
        assert whole.finish_reason == reason
        assert whole.message.content is None
        (call,) = whole.message.tool_calls
        arguments = json.loads(call.function.arguments)
        if call.function.name == "get_weather":
            validator.validate(arguments)
        else:
            assert choice == "required"
            assert (call.function.name, arguments) == ("now", {})
        calls, content, streamed_reason = streamed(client, seed, **fields)
        assert calls == [[call.function.name, call.function.arguments]]
        assert content == ""
        assert streamed_reason == reason


def test_b050_a_call_that_does_not_fit_ends_by_length(client):
    short = {"tool_choice": NAMED, "max_tokens": 24}
    whole = ask(client, 1, **short).choices[0]
    assert whole.finish_reason == "length"
    calls, content, reason = streamed(client, 1, **short)
    assert reason == "length"
    assert content == (whole.message.content or "")
    found = whole.message.tool_calls or []
    assert calls == [[call.function.name, call.function.arguments] for call in found]


def test_b059_a_schema_that_cannot_be_enforced_harms_nobody(client):
    for parameters in (
        {"type": 5},
        {"not": {}},
        {"properties": {"a": {"type": "string", "pattern": "("}}},
        {"properties": {"a": {"$ref": "#/x"}}},
    ):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                ask(client, 1, tools=tools, tool_choice="required", stream=stream)
            assert caught.value.param.startswith("tools")
    assert ask(client, 1, tool_choice="none", max_tokens=8).choices[0].message.content


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_b050_calls_are_forced_from_the_end_of_the_reasoning_on():
    families = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with ServeProcess(
        *families, "--chat-template", THINKING, model=default_model_path(), num_kv_blocks=512
    ) as process:
        client = process.client()
        asked = {"tools": TOOLS, "seed": 3, "temperature": 1, "thinking_token_budget": 8}
        for choice in ("required", NAMED):
            fields = {**asked, "tool_choice": choice, "parallel_tool_calls": False}
            whole = client.chat(**fields, max_tokens=200).json
            message = whole["choices"][0]["message"]
            assert message["reasoning"]
            assert message["content"] is None
            assert json.loads(message["tool_calls"][0]["function"]["arguments"]) is not None
            assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 8}
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": WEATHER}}
        asked["parallel_tool_calls"] = False
        either = client.chat(**asked, response_format=schema, max_tokens=200).json
        message = either["choices"][0]["message"]
        assert message["reasoning"]
        if message["content"] is not None:
            jsonschema.Draft202012Validator(WEATHER).validate(json.loads(message["content"]))
        else:
            assert message["tool_calls"]
