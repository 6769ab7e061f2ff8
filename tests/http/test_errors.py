"""Errors: their shape, their status, and the field that they name."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from helpers.fake_engine import FakeEngine, Script
from helpers.live_server import LiveServer

MESSAGE = "the prompt was: secret words"
KEYS = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def server():
    with LiveServer() as server:
        yield server


def check(reply, status, parameter=None, code=...):
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json) == {"error"}
    assert set(reply.error) == KEYS
    assert reply.error["param"] == parameter
    assert reply.error["code"] is None or isinstance(reply.error["code"], str)
    if code is not ...:
        assert reply.error["code"] == code
    return reply.error["message"]


REFUSED = {
    "temperature": [-1, 2.5, "1", True, [], 1e400],
    "top_p": [0, 1.5, -1, "x"],
    "top_k": [-2, 1.5, "5"],
    "min_p": [1.1, -0.1],
    "n": [0, -1, 1.5, 10**9, "2", True],
    "max_tokens": [-1, 10**12, "16", 1.5],
    "min_tokens": [-1, 17, "1"],
    "seed": ["1", 1.5, 2**64, -(2**63) - 1],
    "stop": ["", [""], 5, ["a"] * 65, ["x" * 1025], [1]],
    "stop_token_ids": [[-1], [10**6], ["a"], 5, list(range(2000))],
    "logprobs": [-2, 21, "1", True],
    "prompt_logprobs": [-2, 21],
    "truncate_prompt_tokens": [0, -2],
    "stream": ["yes", 1],
    "echo": ["yes"],
    "ignore_eos": [1],
    "priority": ["high", 1.5, 2**63, -(10**30)],
    "cache_salt": ["", 5],
    "stream_options": [5, {"include_usage": 1}],
    "timeout": [0, -1, "1"],
    "model": [5],
    "presence_penalty": [3, -2.5, "1", True],
    "frequency_penalty": [2.1, 1e400],
    "repetition_penalty": [0, -1, 1e400, "1"],
    "logit_bias": [
        [1],
        {"-1": 1},
        {"x": 1},
        {"1": "a"},
        {"1": 1e400},
        {"1000000": 1},
        {str(i): 1 for i in range(2000)},
    ],
    "allowed_token_ids": [[], [-1], [10**6], ["a"], 5],
    "bad_words": [[""], [1], "word", ["x"] * 129, ["x" * 1025]],
    "thinking_token_budget": [-2, 1.5, "1", 5],
    "repetition_detection": [
        {},
        5,
        {"max_pattern_size": 0},
        {"max_pattern_size": 3, "min_count": 1},
        {"max_pattern_size": 10**6},
    ],
    "logprob_token_ids": [[-1], [10**6], list(range(129))],
    "stream_interval": [0, 1.5],
    "vllm_xargs": [5, {"a": 1}, {"a": {}}],
    "use_beam_search": ["yes"],
    "length_penalty": [2, "1"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_b006_b015_b016_b127_values_are_refused_by_name_before_anything_is_queued(server, name):
    calls = len(server.engine.calls)
    for value in REFUSED[name]:
        body = json.dumps({"prompt": "One", name: value}).replace("Infinity", "1e999")
        reply = server.post("/v1/completions", body.encode())
        message = check(reply, 400, parameter := reply.error["param"])
        assert parameter.partition("[")[0].partition(".")[0] == name, (value, parameter)
        assert name in message
    assert len(server.engine.calls) == calls
    assert server.complete().status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": None},
        {"stop": []},
        {"stop": "x"},
        {"top_k": 10**9},
        {"top_k": -1},
        {"min_p": 1.0},
        {"seed": -1},
        {"seed": 2**63},
        {"temperature": 1e-8},
        {"top_p": 1e-4},
        {"max_tokens": 10**6},
    ],
)
def test_b006_b015_edges_that_are_fine(server, fields):
    assert server.complete(**fields).json["choices"][0]["text"].startswith("One two three")


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "max_tokens", "something_else"])
def test_b015_numbers_that_json_does_not_have_are_named(server, constant, name):
    body = f'{{"prompt": "One", "{name}": {constant}}}'.encode()
    message = check(server.post("/v1/completions", body), 400, name)
    assert constant in message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff",
        b'{"prompt": "\xff"}',
        b'{"prompt": "One"} x',
        b'{"prompt": "One",}',
        b"{" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"prompt": "One", "logit_bias": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b'{"prompt": "One", "user": {"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}}",
    ],
)
def test_b065_bodies_that_are_no_requests(server, body):
    reply = server.post("/v1/completions", body)
    assert reply.status == 400
    assert set(reply.error) == KEYS
    assert server.get("/health").status == 200


def test_missing_fields_are_named(server):
    check(server.post("/v1/completions", {}), 400, "prompt")
    check(server.post("/v1/chat/completions", {}), 400, "messages")
    check(server.post("/detokenize", {}), 400, "tokens")
    check(server.post("/tokenize", {}), 400, "prompt")


def test_a_model_that_is_not_served_is_a_404(server):
    for reply in (
        server.complete(model="gpt-9"),
        server.chat(model="gpt-9"),
        server.get("/v1/models/gpt-9"),
        server.post("/tokenize", {"prompt": "a", "model": "gpt-9"}),
    ):
        message = check(reply, 404, "model", "model_not_found")
        assert "gpt-9" in message
        assert "fake/model" in message


def test_paths_and_methods(server):
    check(server.get("/v1/nothing"), 404, None, "not_found")
    check(server.get("/v1/completions"), 405, None, "method_not_allowed")
    check(server.request("DELETE", "/v1/models"), 405, None, "method_not_allowed")
    assert server.get("/v1/models/").status == 404
    assert server.get("//health").status == 404


def test_only_json_is_taken(server):
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        reply = server.post("/v1/completions", b"{}", **{"content-type": media_type})
        check(reply, 415, None, "unsupported_media_type")
    body = b'{"prompt": "One two three"}'
    for encoding in ("gzip", "br", "zstd"):
        reply = server.post("/v1/completions", b"{}", **{"content-encoding": encoding})
        check(reply, 415, None, "unsupported_media_type")
        assert encoding in reply.json["error"]["message"]
    for media_type in ("application/json; charset=utf-8", "Application/JSON", "application/x+json"):
        assert server.post("/v1/completions", body, **{"content-type": media_type}).status == 200


@pytest.mark.parametrize("half", [r"\ud83d", r"a\ude00b", r"\ud83d "])
def test_half_a_character_is_refused_by_the_name_of_its_field(server, half):
    """What a client in JavaScript sends that cuts a text in the middle of an emoji."""
    texts = {
        "prompt": b'{"prompt": "%s"}',
        "stop[1]": b'{"prompt": "One", "stop": ["a", "%s"]}',
        "user": b'{"prompt": "One", "user": "%s"}',
    }
    for parameter, text in texts.items():
        reply = server.post("/v1/completions", text.replace(b"%s", half.encode()))
        assert "lone surrogate" in check(reply, 400, parameter)
    reply = server.post("/v1/completions", b'{"prompt": "One", "%s": 1}' % half.encode())
    assert "lone surrogate" in check(reply, 400, None)
    assert server.post("/v1/completions", rb'{"prompt": "\ud83d\ude00"}').status == 200


def test_b038_a_stream_of_many_prompts_is_refused_for_any_of_them():
    """Long texts are tokenized in threads, while the core begins with the short ones."""

    class Threaded(FakeEngine):
        async def generate(self, prompt, params, **options):
            if isinstance(prompt, str) and len(prompt) > 1000:
                await asyncio.sleep(0.1)
            async for output in super().generate(prompt, params, **options):
                yield output

    engine = Threaded(lambda prompt, params: Script(prompt, first_step_seconds=0.02))
    with LiveServer(engine) as server:
        reply = server.complete(prompt=["One two three", "two " * 1000], stream=True)
        check(reply, 400, "prompt", "context_length_exceeded")
        whole = server.complete(prompt=["One two three", "two three"])
        assert [each["text"] for each in whole.json["choices"]] == ["One two three", "two three"]


def test_a_message_does_not_repeat_endless_names(server):
    reply = server.post("/v1/completions", b'{"prompt": "One", "%s": NaN}' % (b"x" * 100_000))
    assert reply.status == 400
    assert len(reply.body) < 1000


def test_fields_are_named_as_the_client_names_them(server):
    for fields in ({}, {"stream": True}):
        message = check(server.complete(prompt=[10**6], **fields), 400, "prompt")
        assert message.startswith("prompt holds 1000000;")
    for value in (21, -1, -2):
        for fields in ({}, {"stream": True}):
            reply = server.chat(logprobs=True, top_logprobs=value, **fields)
            assert check(reply, 400, "top_logprobs").startswith(f"top_logprobs={value}")
    message = check(server.chat(messages=[{"content": "x"}]), 400, "messages[0].role")
    assert "is missing" in message


def test_unknown_fields_are_ignored_and_logged_once(server, caplog):
    caplog.set_level(logging.INFO, "tokenmill.entrypoints.http.body")
    for _ in range(3):
        assert server.complete(brand_new_field=[1, 2]).status == 200
    named = [r for r in caplog.records if "brand_new_field" in r.getMessage()]
    assert len(named) == 1
    server.complete(**{"my secret prompt as a key!": 1})
    assert "secret" not in caplog.text


def test_an_unforeseen_failure_is_a_500_that_tells_nothing(caplog):
    def author(prompt, params):
        raise ZeroDivisionError(MESSAGE)

    with LiveServer(FakeEngine(author)) as server:
        for fields in ({}, {"stream": True}):
            reply = server.complete(**fields)
            check(reply, 500, None, "internal_error")
            assert "secret" not in reply.body.decode()
    assert "ZeroDivisionError" in caplog.text
    assert "fake_engine.py" in caplog.text  # where it happened
    assert "secret" not in caplog.text


def test_an_unforeseen_failure_in_mid_stream(caplog):
    class Failing(FakeEngine):
        async def _steps(self, source):
            async for output in super()._steps(source):
                yield output
                raise ZeroDivisionError(MESSAGE)

    with LiveServer(Failing()) as server:
        reply = server.complete(stream=True)
        assert reply.status == 200
        *_, error, done = reply.events
        assert json.loads(error)["error"]["code"] == "internal_error"
        assert done == "[DONE]"
        server.wait_until(lambda: not server.engine.running)
    assert "secret" not in caplog.text


def test_request_ids_go_in_and_out(server):
    assert server.get("/health", **{"x-request-id": "my-id.1"}).headers["x-request-id"] == "my-id.1"
    for bad in ("a b", "x" * 129, "a\tb", "ä"):
        given = server.get("/health", **{"x-request-id": bad.encode()}).headers["x-request-id"]
        assert given != bad
        assert len(given) == 32
    for reply in (server.complete(), server.complete(temperature=9), server.get("/nope")):
        assert reply.headers["x-request-id"]


def test_client_ids_are_no_keys():
    """Two requests with one id at the same time are two requests."""
    import threading

    slow = FakeEngine(lambda prompt, params: Script(prompt, step_seconds=0.02))
    with LiveServer(slow) as server:
        replies = []

        def ask(prompt):
            body = {"prompt": prompt, "request_id": "same"}
            replies.append(server.post("/v1/completions", body, **{"x-request-id": "same"}))

        threads = [threading.Thread(target=ask, args=(p,)) for p in ("One two", "three four")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {r.json["choices"][0]["text"] for r in replies} == {"One two", "three four"}
        assert len({r.json["id"] for r in replies}) == 2
        assert {r.headers["x-request-id"] for r in replies} == {"same"}
