"""Streams: the bytes on the wire, and that they say what the answer in one piece says."""

from __future__ import annotations

import json
import threading
import time

import pytest

from helpers.fake_engine import FakeEngine, Script, tiny_tokenizer
from helpers.live_server import LiveServer, chunks_of, parse_events
from tokenmill.contracts.request import FinishReason

UNICODE = "Größe 你好 😀🎉👨‍👩‍👧 Привет naïve"


@pytest.fixture(scope="module")
def server():
    with LiveServer() as server:
        yield server


def joined(chunks):
    """Text, logprob tokens, ids and finish reason of each choice."""
    choices = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            entry = choices.setdefault(
                choice["index"], {"text": "", "tokens": [], "ids": [], "offsets": []}
            )
            delta = choice.get("delta", choice)
            entry["text"] += delta.get("text") or delta.get("content") or ""
            entry["ids"] += choice.get("token_ids", [])
            if choice["logprobs"]:
                if "content" in choice["logprobs"]:
                    entry["tokens"] += [e["token"] for e in choice["logprobs"]["content"]]
                else:
                    entry["tokens"] += choice["logprobs"]["tokens"]
                    entry["offsets"] += choice["logprobs"]["text_offset"]
            if choice["finish_reason"]:
                assert "finish_reason" not in entry, "a choice ends once"
                entry["finish_reason"] = choice["finish_reason"]
                entry["stop_reason"] = choice["stop_reason"]
    return choices


STREAMED = {
    "plain": {},
    "length": {"max_tokens": 2},
    "stop string over tokens": {"stop": ["wo th"]},
    "stop string shown": {"stop": ["wo th"], "include_stop_str_in_output": True},
    "stop id": {"stop_token_ids": [5]},
    "no text": {"prompt": "One", "stop": ["O"]},
    "several": {"n": 3, "temperature": 1},
    "unicode": {"prompt": UNICODE, "max_tokens": 200},
    "cut inside a character": {"prompt": "你好世界" * 3, "max_tokens": 4},
    "logprobs": {"logprobs": 2},
    "echo": {"echo": True},
    "echo with logprobs": {"echo": True, "logprobs": 1},
    "ids": {"return_token_ids": True},
    "special tokens": {"skip_special_tokens": False},
    "many prompts": {"prompt": ["One two", "three four", UNICODE], "max_tokens": 40},
}


@pytest.mark.parametrize("name", STREAMED)
def test_b001_b008_b039_a_stream_says_what_one_piece_says(server, name):
    fields = STREAMED[name]
    whole = server.complete(**fields).json
    *chunks, usage = chunks_of(
        server.complete(**fields, stream=True, stream_options={"include_usage": True})
    )
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    streamed = joined(chunks)
    assert sorted(streamed) == [choice["index"] for choice in whole["choices"]]
    for choice in whole["choices"]:
        entry = streamed[choice["index"]]
        assert entry["text"] == choice["text"]
        assert entry["finish_reason"] == choice["finish_reason"]
        assert entry["stop_reason"] == choice["stop_reason"]
        if "logprobs" in fields:
            assert entry["tokens"] == choice["logprobs"]["tokens"]
            assert entry["offsets"] == choice["logprobs"]["text_offset"]
        if "return_token_ids" in fields:
            assert entry["ids"] == choice["token_ids"]


CHATS = {
    "plain": {},
    "length": {"max_tokens": 4},
    "stop": {"stop": "assis"},
    "several": {"n": 2, "temperature": 1},
    "logprobs": {"logprobs": True, "top_logprobs": 1},
    "ids": {"return_token_ids": True},
}


@pytest.mark.parametrize("name", CHATS)
def test_b039_a_streamed_chat_says_what_one_piece_says(server, name):
    fields = CHATS[name]
    whole = server.chat(**fields).json
    *chunks, usage = chunks_of(
        server.chat(**fields, stream=True, stream_options={"include_usage": True})
    )
    assert usage["usage"] == whole["usage"]
    streamed = joined(chunks)
    for choice in whole["choices"]:
        entry = streamed[choice["index"]]
        assert entry["text"] == choice["message"]["content"]
        assert entry["finish_reason"] == choice["finish_reason"]
        if "logprobs" in fields:
            assert entry["tokens"] == [e["token"] for e in choice["logprobs"]["content"]]
        if "return_token_ids" in fields:
            assert entry["ids"] == choice["token_ids"]
            assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]


def test_b001_no_part_of_a_stop_string_is_shown(server):
    text = "One two three four"
    for start in range(len(text) - 2):
        for length in (2, 5):
            stop = text[start : start + length]
            chunks = chunks_of(server.complete(prompt=text, stop=[stop], stream=True))
            (entry,) = joined(chunks).values()
            assert entry["text"] == text[: text.index(stop)]
            assert (entry["finish_reason"], entry["stop_reason"]) == ("stop", stop)


def test_b008_no_replacement_character_before_the_end(server):
    chunks = chunks_of(server.complete(prompt=UNICODE, max_tokens=200, stream=True))
    assert all("\ufffd" not in chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.parametrize(
    ("options", "num_usage", "num_continuous"),
    [
        (None, 0, 0),
        ({}, 0, 0),
        ({"include_usage": False}, 0, 0),
        ({"include_usage": True}, 1, 0),
        ({"include_usage": True, "continuous_usage_stats": True}, 1, 3),
        ({"continuous_usage_stats": True}, 0, 3),
    ],
)
def test_b040_usage_comes_when_asked_for(server, options, num_usage, num_continuous):
    chunks = chunks_of(server.complete(stream=True, stream_options=options))
    last = [chunk for chunk in chunks if not chunk["choices"]]
    assert len(last) == num_usage
    with_choices = [chunk for chunk in chunks if chunk["choices"]]
    told = [chunk["usage"] for chunk in with_choices if chunk.get("usage")]
    assert len(told) == num_continuous
    if num_continuous:
        assert [usage["completion_tokens"] for usage in told] == [1, 2, 4]
        assert told[-1]["total_tokens"] == 7
    if not num_usage and not num_continuous:
        assert all("usage" not in chunk for chunk in chunks)


def test_b040_stream_options_need_a_stream(server):
    for ask in (server.complete, server.chat):
        reply = ask(stream_options={"include_usage": True})
        assert (reply.status, reply.error["param"]) == (400, "stream_options")


def test_b038_what_can_be_checked_is_checked_before_the_status(server):
    for fields in ({"temperature": 9}, {"prompt": "x " * 2000}, {"stop": [""]}, {"n": 0}):
        reply = server.complete(stream=True, **fields)
        assert reply.status == 400
        assert reply.headers["content-type"] == "application/json"


def test_b038_a_failure_in_mid_stream_reaches_the_client():
    failing = Script([5, 6, 7], FinishReason.ERROR, "logits were not finite.")
    with LiveServer(FakeEngine(lambda prompt, params: failing), log_requests=True) as server:
        for ask in (server.complete, server.chat):
            *chunks, error = chunks_of(ask(stream=True))
            assert chunks
            assert error["error"]["message"] == "logits were not finite."
            assert error["error"]["code"] == "generation_error"
        server.wait_until(lambda: not server.engine.running)
        assert server.complete(stream=True, prompt=["a", "b"]).events[-1] == "[DONE]"


def test_b042_a_long_prefill_ends_no_stream():
    computed = threading.Event()
    slow = FakeEngine(lambda prompt, params: Script(prompt, gates={0: computed}))
    with LiveServer(slow, stream_keep_alive=0.1) as server:
        started = time.monotonic()
        connection = server.open("/v1/completions", {"prompt": "One two three", "stream": True})
        response = connection.getresponse()  # the status does not wait for the first token
        for _ in range(3):
            assert response.readline().startswith(b":")
            assert response.readline() == b"\n"
        computed.set()
        rest = response.read()
        connection.close()
        assert joined([json.loads(event) for event in parse_events(rest)[:-1]])[0]["text"] == (
            "One two three"
        )
        assert 3 + rest.count(b"\n:") <= (time.monotonic() - started) / 0.1 + 1


def test_b042_a_limit_on_a_request_ends_in_an_error():
    slow = FakeEngine(lambda prompt, params: Script(prompt * 9, step_seconds=600.0))
    with LiveServer(slow, request_timeout=0.3) as server:
        *chunks, error = chunks_of(server.complete(stream=True, max_tokens=100))
        assert chunks
        assert error["error"]["code"] == "deadline_exceeded"
        reply = server.complete(max_tokens=100)
        assert reply.status == 504
        assert reply.headers["x-should-retry"] == "false"
        sooner = server.complete(max_tokens=100, timeout=0.01)
        assert "0.01" in sooner.error["message"]


def test_tokens_are_sent_when_they_come():
    gates = {number: threading.Event() for number in (1, 2)}
    slow = FakeEngine(lambda prompt, params: Script(prompt, gates=gates))
    with LiveServer(slow) as server:
        connection = server.open("/v1/completions", {"prompt": "One two three", "stream": True})
        response = connection.getresponse()
        for number, text in enumerate(["One", " two", " three"]):
            if number:
                gates[number].set()  # each is made only when the one before has been read
            chunk = response.readline()
            assert json.loads(chunk.removeprefix(b"data: "))["choices"][0]["text"] == text
            assert response.readline() == b"\n"
        connection.close()


def test_chunks_are_the_same_as_a_json_library_s(server):
    """Written by hand, but of one form: what an encoder makes of them is byte for byte the same."""
    import msgspec

    odd = 'quotes " and \\ and \n and \u2028'
    replies = [
        server.complete(stream=True, prompt=odd, logprobs=1),
        server.chat(stream=True, stream_options={"include_usage": True}, logprobs=True),
        server.complete(stream=True, return_token_ids=True, timings=True),
    ]
    for reply in replies:
        for event in reply.events[:-1]:
            assert msgspec.json.encode(msgspec.json.decode(event)).decode() == event


def test_texts_with_line_breaks_are_one_event_each(server):
    text = 'a\n\ndata: [DONE]\n\nb "\\ \u2028 \r\n'
    chunks = chunks_of(server.complete(prompt=text, max_tokens=200, stream=True))
    assert joined(chunks)[0]["text"] == tiny_tokenizer().decode(tiny_tokenizer().encode(text))
