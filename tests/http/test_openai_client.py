"""The official client, as people use it, against a server."""

from __future__ import annotations

import asyncio
import json
import threading

import openai
import pydantic
import pytest

from helpers.fake_engine import FakeEngine, Script, tiny_tokenizer
from helpers.live_server import LiveServer
from tokenmill.contracts.request import FinishReason
from tokenmill.engine.serve_options import ServeOptions

HELLO = [{"role": "user", "content": "Hi"}]
ANSWER = "user\nHi\nassistant\n"


@pytest.fixture(scope="module")
def server():
    with LiveServer(api_key=["sk-test"]) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-test", max_retries=0) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["fake/model"]
    assert client.models.retrieve("fake/model").id == "fake/model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_chat(client):
    reply = client.chat.completions.create(
        model="fake/model", messages=HELLO, logprobs=True, top_logprobs=2, max_completion_tokens=50
    )
    assert reply.choices[0].message.content == ANSWER
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    first = reply.choices[0].logprobs.content[1]
    assert [best.token for best in first.top_logprobs] == ["(", ")"]


def test_chat_stream(client):
    stream = client.chat.completions.create(
        model="fake/model", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ANSWER
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens > 0


def test_chat_stream_helper(client):
    """The accumulating helper checks the chunks' order."""
    with client.chat.completions.stream(
        model="fake/model", messages=HELLO, n=2, temperature=1
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert [choice.message.content for choice in final.choices] == [ANSWER] * 2


def test_completions(client):
    reply = client.completions.create(
        model="fake/model", prompt=["One two", "three"], logprobs=1, echo=True, seed=1
    )
    assert [choice.text for choice in reply.choices] == ["One twoOne two", "threethree"]
    assert reply.choices[0].logprobs.tokens[0] == "One"
    ids = tiny_tokenizer().encode("One two")
    stream = client.completions.create(model="fake/model", prompt=ids, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "One two"


def test_extra_fields(client):
    reply = client.completions.create(
        model="fake/model", prompt="One two", extra_body={"top_k": 5, "return_token_ids": True}
    )
    assert reply.choices[0].model_extra["token_ids"][-1] == 2


def test_errors_are_the_client_s_own(server, client):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake/model", messages=HELLO, temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    assert isinstance(bad.value.code, str)
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    engine = server.engine
    engine.is_draining = True
    try:
        with pytest.raises(openai.InternalServerError) as unavailable:
            client.completions.create(model="fake/model", prompt="One")
        assert unavailable.value.status_code == 503
    finally:
        engine.is_draining = False


def test_b038_an_error_in_mid_stream_is_raised():
    failing = FakeEngine(lambda p, s: Script([5, 6], FinishReason.ERROR, "it broke."))
    with LiveServer(failing) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        with client, pytest.raises(openai.APIError, match="it broke"):
            list(client.chat.completions.create(model="", messages=HELLO, stream=True))


def test_b085_the_client_comes_back_when_the_queue_has_room():
    refused = threading.Event()
    slow = FakeEngine(lambda p, s: Script([5], gates={0: refused}), max_num_seqs=1)
    with LiveServer(slow, options=ServeOptions(max_queue=0)) as server:

        async def ask_two():
            async with openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="x", max_retries=3
            ) as client:
                asks = [client.completions.create(model="", prompt="One") for _ in range(2)]
                answers = asyncio.gather(*asks)
                async with asyncio.timeout(60):
                    while not server.state.admission.num_refused:
                        await asyncio.sleep(0.005)
                refused.set()
                return await answers

        assert len(asyncio.run(ask_two())) == 2
        assert server.state.admission.num_refused >= 1


def test_breaking_off_a_stream_ends_the_request():
    endless = FakeEngine(lambda p, s: Script([5] * 9999, step_seconds=0.01), max_model_len=16384)
    with LiveServer(endless) as server:

        async def first_chunk():
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
                stream = await client.completions.create(
                    model="", prompt="One", stream=True, max_tokens=9999
                )
                async for chunk in stream:
                    await stream.close()
                    return chunk.choices[0].text
            return None

        assert asyncio.run(first_chunk()) != ""
        server.wait_until(lambda: not endless.running)


def test_many_at_once(server):
    async def ask_many():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="sk-test") as client:
            asks = [
                client.chat.completions.create(
                    model="", messages=[{"role": "user", "content": f"Say {i}"}]
                )
                for i in range(64)
            ]
            return await asyncio.gather(*asks)

    texts = [reply.choices[0].message.content for reply in asyncio.run(ask_many())]
    assert texts == [f"user\nSay {i}\nassistant\n" for i in range(64)]


CALLS = (
    '<think>Two.</think>I look. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}'
    '\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def calling():
    """A client of a model that calls two tools."""
    engine = FakeEngine(
        lambda p, s: Script(tiny_tokenizer().encode(CALLS)), reasoning_parser="qwen3"
    )
    with (
        LiveServer(engine, tool_call_parser="hermes") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client


def check_calls(message):
    assert message.content == "I look."
    assert message.model_extra["reasoning_content"] == "Two."
    first, second = message.tool_calls
    assert first.id != second.id
    assert (first.type, first.function.name) == ("function", "get_weather")
    assert json.loads(first.function.arguments) == {"city": "Bern"}
    assert (second.function.name, second.function.arguments) == ("now", "{}")


def test_b047_tools(calling):
    reply = calling.chat.completions.create(model="", messages=HELLO, tools=TOOLS)
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.usage.completion_tokens_details.reasoning_tokens > 0
    check_calls(reply.choices[0].message)
    # What came back can be sent back.
    answer = reply.choices[0].message.model_dump(exclude_none=True)
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "42"}
        for call in reply.choices[0].message.tool_calls
    ]
    again = calling.chat.completions.create(
        model="", messages=[*HELLO, answer, *results], tools=TOOLS
    )
    check_calls(again.choices[0].message)


def test_b047_tools_through_the_accumulating_helper(calling):
    with calling.chat.completions.stream(
        model="", messages=HELLO, tools=TOOLS, n=2, temperature=1
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 4
    for choice in final.choices:
        assert choice.finish_reason == "tool_calls"
        check_calls(choice.message)


class Weather(pydantic.BaseModel):
    city: str


class Now(pydantic.BaseModel):
    pass


def test_strict_tools_are_parsed_into_models(calling):
    tools = [
        openai.pydantic_function_tool(Weather, name="get_weather"),
        openai.pydantic_function_tool(Now, name="now"),
    ]
    reply = calling.chat.completions.parse(model="", messages=HELLO, tools=tools)
    calls = reply.choices[0].message.tool_calls
    assert [call.function.parsed_arguments for call in calls] == [Weather(city="Bern"), Now()]
    with calling.chat.completions.stream(model="", messages=HELLO, tools=tools) as stream:
        done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in done] == [Weather(city="Bern"), Now()]
