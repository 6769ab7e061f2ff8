"""Anthropic's official client, as people use it, against a server."""

from __future__ import annotations

import asyncio

import anthropic
import pydantic
import pytest

from helpers.fake_engine import FakeEngine, Script, tiny_tokenizer
from helpers.live_server import LiveServer
from helpers.tool_chats import calling_until_answered
from tokenmill.contracts.request import FinishReason
from tokenmill.engine.serve_options import ServeOptions

HELLO = [{"role": "user", "content": "Hi"}]
ANSWER = "user\nHi\nassistant\n"
CALL = (
    '<think>Two.</think>I look. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}'
    "\n</tool_call>"
)
TOOLS = [
    {
        "name": "get_weather",
        "description": "The weather.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]


def connect(server, **settings):
    settings = {"api_key": "sk-test", "max_retries": 0, **settings}
    return anthropic.Anthropic(base_url=server.url, **settings)


@pytest.fixture(scope="module")
def server():
    with LiveServer(api_key=["sk-test"]) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with connect(server) as client:
        yield client


def say(client, **fields):
    fields = {"model": "fake/model", "max_tokens": 200, "messages": HELLO, **fields}
    return client.messages.create(**fields)


def test_a_message(client):
    message = say(client, system="Be brief.", metadata={"user_id": "u"})
    assert message.content[0].text == "system\nBe brief.\n" + ANSWER
    assert (message.stop_reason, message.role) == ("end_turn", "assistant")
    assert message.usage.input_tokens > 0
    assert message._request_id
    # What came back can be sent back.
    again = say(client, messages=[*HELLO, message.to_param(), *HELLO])
    assert again.content[0].text.count("Be brief.") == 1


def test_streams(client):
    events = list(say(client, stream=True))
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]
    with client.messages.stream(model="fake/model", max_tokens=200, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == ANSWER
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 1


def test_counting_and_betas(client):
    count = client.messages.count_tokens(model="fake/model", messages=HELLO)
    assert count.input_tokens == say(client).usage.input_tokens
    message = client.beta.messages.create(
        model="fake/model",
        max_tokens=200,
        messages=HELLO,
        betas=["interleaved-thinking-2025-05-14"],
    )
    assert message.content[0].text == ANSWER


def test_models(client):
    assert [model.id for model in client.models.list()] == ["fake/model"]
    assert client.models.retrieve("fake/model").id == "fake/model"


def test_every_way_to_bring_a_key(server):
    with connect(server, api_key=None, auth_token="sk-test") as client:
        assert say(client).stop_reason == "end_turn"
    with (
        connect(server, default_headers={"x-api-key": "sk-test"}, api_key=None, auth_token="not-it")
        as client
    ):  # fmt: skip
        assert say(client).stop_reason == "end_turn"


def test_errors_are_the_client_s_own(server, client):
    with pytest.raises(anthropic.BadRequestError) as bad:
        say(client, extra_body={"temperature": 9})
    assert (bad.value.type, bad.value.error_code) == ("invalid_request_error",) * 2
    assert bad.value.request_id
    with pytest.raises(anthropic.NotFoundError) as missing:
        say(client, model="claude")
    assert missing.value.error_code == "model_not_found"
    with connect(server, api_key="wrong") as other, pytest.raises(anthropic.AuthenticationError):
        say(other)
    engine = server.engine
    engine.is_draining = True
    try:
        with pytest.raises(anthropic.OverloadedError):
            say(client)
    finally:
        engine.is_draining = False


def test_b038_an_error_in_mid_stream_is_raised():
    failing = FakeEngine(lambda p, s: Script([5, 6], FinishReason.ERROR, "it broke."))
    with (
        LiveServer(failing) as server,
        connect(server) as client,
        pytest.raises(anthropic.APIStatusError, match="it broke"),
    ):
        list(say(client, stream=True))


def test_b085_the_client_comes_back_when_the_queue_has_room():
    slow = FakeEngine(lambda p, s: Script([5], first_step_seconds=0.3), max_num_seqs=1)
    with LiveServer(slow, options=ServeOptions(max_queue=0)) as server:

        async def ask_two():
            async with anthropic.AsyncAnthropic(
                base_url=server.url, api_key="x", max_retries=3
            ) as client:
                return await asyncio.gather(say(client), say(client))

        assert len(asyncio.run(ask_two())) == 2
        assert server.state.admission.num_refused >= 1


def test_breaking_off_a_stream_ends_the_request():
    endless = FakeEngine(lambda p, s: Script([5] * 9999, step_seconds=0.01), max_model_len=16384)
    with LiveServer(endless) as server, connect(server) as client:
        with client.messages.stream(model="", max_tokens=9999, messages=HELLO) as stream:
            next(iter(stream.text_stream))
        server.wait_until(lambda: not endless.running, seconds=20)


@pytest.fixture(scope="module")
def calling():
    """A client of a model that thinks, and calls a tool until it has an answer."""
    with calling_until_answered(CALL, "21 degrees") as server, connect(server) as client:
        yield client


def check_call(message):
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Two.")
    assert text.text == "I look."
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Bern"})
    assert message.stop_reason == "tool_use"
    return call


def test_b047_tools(calling):
    fields = {"tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    message = say(calling, **fields)
    call = check_call(message)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
    turns = [*HELLO, message.to_param(), {"role": "user", "content": [result]}]
    answer = say(calling, messages=turns, **fields)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == "Warm."


def test_b047_tools_through_the_accumulating_helper(calling):
    with calling.messages.stream(
        model="fake/model", max_tokens=200, messages=HELLO, tools=TOOLS
    ) as stream:
        kinds = {event.type for event in stream}
        check_call(stream.get_final_message())
    assert {"thinking", "signature", "text", "input_json", "content_block_stop"} <= kinds


def test_the_tool_runner_calls_and_answers(calling):
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather.

        Args:
            city: where
        """
        return f"21 degrees in {city}"

    runner = calling.beta.messages.tool_runner(
        model="fake/model", max_tokens=200, messages=HELLO, tools=[get_weather]
    )
    assert runner.until_done().content[0].text == "Warm."


class City(pydantic.BaseModel):
    name: str


def test_answers_are_parsed_into_models():
    engine = FakeEngine(lambda p, s: Script(tiny_tokenizer().encode('{"name": "Bern"}')))
    with LiveServer(engine) as server, connect(server) as client:
        message = client.messages.parse(
            model="fake/model", max_tokens=200, messages=HELLO, output_format=City
        )
        assert server.engine.calls[-1][1].structured_outputs is not None
    assert message.parsed_output == City(name="Bern")
