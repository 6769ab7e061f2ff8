"""Responses through the official client, its typed events and its parsing helpers."""

from __future__ import annotations

import asyncio
import json

import openai
import pydantic
import pytest

from helpers.fake_engine import FakeEngine, Script, tiny_tokenizer
from helpers.live_server import LiveServer
from helpers.tool_chats import calling_until_answered
from tokenmill.contracts.request import FinishReason

ANSWER = "user\nHi\nassistant\n"
CALL = (
    '<think>Two.</think>I look. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}'
    "\n</tool_call>"
)
TOOLS = [
    {
        "type": "function",
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    },
    {"type": "custom", "name": "sh"},
]


def connect(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-test", max_retries=0)


@pytest.fixture(scope="module")
def client():
    with LiveServer(api_key=["sk-test"]) as server, connect(server) as client:
        yield client


@pytest.fixture(scope="module")
def calling():
    """A client of a model that thinks, and calls a tool until it has an answer."""
    with calling_until_answered(CALL, "21 degrees") as server, connect(server) as client:
        yield client


def test_a_response(client):
    response = client.responses.create(model="fake/model", input="Hi", instructions="Be brief.")
    assert response.output_text == "system\nBe brief.\n" + ANSWER
    assert response.status == "completed"
    assert response.usage.total_tokens > response.usage.input_tokens > 0


def test_what_is_kept(client):
    first = client.responses.create(model="fake/model", input="Hi", metadata={"a": "b"})
    assert client.responses.retrieve(first.id) == first
    (item,) = client.responses.input_items.list(first.id)
    assert item.content[0].text == "Hi"
    second = client.responses.create(
        model="fake/model", input="And?", previous_response_id=first.id
    )
    assert second.output_text.startswith(ANSWER + ANSWER)
    assert second.output_text.endswith("user\nAnd?\nassistant\n")
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.retrieve(first.id)
    assert missing.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(model="fake/model", input="And?", previous_response_id=first.id)
    assert (gone.value.code, gone.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )
    count = client.responses.input_tokens.count(model="fake/model", input="Hi")
    assert count.input_tokens == first.usage.input_tokens


def test_events_are_typed(client):
    events = list(client.responses.create(model="fake/model", input="Hi", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert type(events[-1]).__name__ == "ResponseCompletedEvent"
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert {type(event).__name__ for event in deltas} == {"ResponseTextDeltaEvent"}
    assert "".join(event.delta for event in deltas) == events[-1].response.output_text == ANSWER


def test_the_accumulating_helper_checks_the_events(calling):
    with calling.responses.stream(model="fake/model", input="Hi", tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {
        "response.reasoning_text.done",
        "response.output_text.done",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    } <= kinds
    reasoning, message, call = final.output
    assert reasoning.content[0].text == "Two."
    assert message.content[0].text == "I look."
    assert json.loads(call.arguments) == {"city": "Bern"}


@pytest.mark.parametrize("keeps", [True, False])
def test_b047_tools(calling, keeps):
    fields = {"model": "fake/model", "tools": TOOLS, "store": keeps}
    response = calling.responses.create(input="Hi", **fields)
    call = response.output[-1]
    assert (call.type, call.name) == ("function_call", "get_weather")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    if keeps:
        answer = calling.responses.create(
            input=[result], previous_response_id=response.id, **fields
        )
    else:  # what came back can be sent back
        turns = [{"role": "user", "content": "Hi"}, *response.output, result]
        answer = calling.responses.create(input=turns, **fields)
    assert answer.output_text == "Warm."


class GetWeather(pydantic.BaseModel):
    city: str


class City(pydantic.BaseModel):
    name: str


def test_calls_are_parsed_into_models(calling):
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    tool = {"type": "function", **tool["function"]}
    response = calling.responses.parse(model="fake/model", input="Hi", tools=[tool])
    assert response.output[-1].parsed_arguments == {"city": "Bern"}


def test_answers_are_parsed_into_models():
    engine = FakeEngine(lambda p, s: Script(tiny_tokenizer().encode('{"name": "Bern"}')))
    with LiveServer(engine) as server, connect(server) as client:
        response = client.responses.parse(model="fake/model", input="Hi", text_format=City)
        assert response.output_parsed == City(name="Bern")
        assert server.engine.calls[-1][1].structured_outputs is not None
        with client.responses.stream(model="fake/model", input="Hi", text_format=City) as stream:
            assert stream.get_final_response().output_parsed == City(name="Bern")


def test_a_response_in_the_background():
    engine = FakeEngine(lambda p, s: Script([5] * 400, step_seconds=0.02), max_model_len=4096)
    with LiveServer(engine) as server, connect(server) as client:
        begun = client.responses.create(model="fake/model", input="Hi", background=True)
        assert client.responses.retrieve(begun.id).status == "in_progress"
        assert client.responses.cancel(begun.id).status == "cancelled"


def test_errors_are_the_client_s_own(client):
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model="fake/model", input="Hi", temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="Hi")


def test_b038_an_error_in_mid_stream_is_an_event():
    failing = FakeEngine(lambda p, s: Script([5, 6], FinishReason.ERROR, "it broke."))
    with LiveServer(failing) as server, connect(server) as client:
        *_, last = client.responses.create(model="fake/model", input="Hi", stream=True)
    assert type(last).__name__ == "ResponseFailedEvent"
    assert last.response.error.message == "it broke."


def test_breaking_off_a_stream_ends_the_request():
    endless = FakeEngine(lambda p, s: Script([5] * 9999, step_seconds=0.01), max_model_len=16384)
    with LiveServer(endless) as server:

        async def first_delta():
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
                stream = await client.responses.create(model="", input="Hi", stream=True)
                async for event in stream:
                    if event.type == "response.output_text.delta":
                        await stream.close()
                        return event.delta
            return None

        assert asyncio.run(first_delta())
        server.wait_until(lambda: not endless.running, seconds=60)
