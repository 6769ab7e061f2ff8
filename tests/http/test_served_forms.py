"""Forms through a server with a real engine behind it: what clients get, and what they cannot break."""

# ruff: noqa: E501 - a case a line

from __future__ import annotations

import json
import re
import threading
import time
from functools import partial

import openai
import pytest

from helpers.live_server import chunks_of
from helpers.schemas import load, validator
from helpers.serve_process import ServeProcess
from helpers.timing import in_time

RECORD = {
    "type": "object",
    "properties": {
        "first name": {"enum": ["Alice", "Bob"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["first name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def served():
    with ServeProcess() as process:
        yield process


@pytest.fixture(scope="module")
def client(served):
    return served.client()


FORMS = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": RECORD}}}, None),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"structured_outputs": {"choice": ["yes", "no", "你好"]}}, "yes|no|你好"),
    ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, "x[0-9]"),
    ({"guided_regex": "c|d"}, "c|d"),
]  # fmt: skip


def check(text, pattern):
    if pattern is None:
        validator(RECORD).validate(load(text))
    else:
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(("fields", "pattern"), FORMS, ids=str)
def test_streams_and_answers_have_the_form_and_are_the_same(client, fields, pattern):
    asked = {**fields, "max_tokens": 100, "temperature": 1.0, "seed": 7}
    whole = client.chat(**asked).json["choices"][0]
    assert whole["finish_reason"] == "stop"
    check(whole["message"]["content"], pattern)
    chunks = chunks_of(client.chat(**asked, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(d.get("content") or "" for d in deltas) == whole["message"]["content"]
    text = client.complete(**asked).json["choices"][0]["text"]
    check(text, pattern)


def test_the_official_client_parses_what_it_asked_for(served):
    base_url = f"{served.wait_until_ready()}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none") as official:
        answer = official.chat.completions.create(
            model=official.models.list().data[0].id,
            messages=[{"role": "user", "content": "Who?"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "who", "schema": RECORD},
            },
            max_tokens=100,
        )
    validator(RECORD).validate(load(answer.choices[0].message.content))


MALFORMED = [
    {"guided_regex": "("},
    {"guided_regex": "[z-a]"},
    {"guided_regex": "(?=x)y"},
    {"guided_regex": "(a)\\1"},
    {"guided_regex": "a{5,2}"},
    {"guided_regex": "a\\"},
    {"guided_grammar": "root ::= missing"},
    {"guided_grammar": 'root ::= ("a"'},
    {"guided_grammar": "start: missing"},
    {"guided_grammar": "start: /(/"},
    {"guided_grammar": "what is this"},
    {"guided_grammar": "start: start\n"},
    {"guided_json": {"type": "text"}},
    {"guided_json": {"type": "array", "uniqueItems": True}},
    {"guided_json": {"$ref": "https://example.com/x"}},
    {"guided_json": {"$ref": "#/nowhere"}},
    {"guided_json": {"type": "string", "pattern": "("}},
    {"guided_json": {"type": "string", "minLength": 5, "maxLength": 2}},
    {"guided_json": {"oneOf": [{"minimum": 1}, {"maximum": 5}]}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
    {"response_format": {"type": "structural_tag", "format": {"type": "no"}}},
    {"structured_outputs": {"json": {"enum": []}}},
]


@pytest.mark.parametrize("fields", MALFORMED, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_b059_what_is_malformed_is_a_400_at_once(client, fields, stream):
    ask = partial(client.chat, **fields, stream=stream)
    reply = in_time(ask, 2, clock=time.monotonic)
    assert reply.status == 400, reply.body
    (name,) = fields
    assert reply.error["param"].startswith(name)
    assert reply.error["message"].startswith(reply.error["param"])
    assert client.get("/health").status == 200


WILD = [
    {"guided_regex": "((a{1,100}){1,100}){1,100}"},
    {"guided_regex": "(a*)*(a*)*(a*)*b"},
    {"guided_regex": "a?" * 5_000},
    {"guided_grammar": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40 ::= "a"'},
    {"guided_grammar": "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}?\n' for i in range(3900)) + 'r3900: "b"\n'},
    {"guided_json": {"$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(3900)} | {"d3900": {}}, "$ref": "#/$defs/d0"}},
    {"guided_json": {"allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(5, 15)]}},
]  # fmt: skip


def test_b065_wild_forms_leave_the_server_unharmed(client):
    """Others go on meanwhile, in the same core: it was not started again."""
    pid_before = restarts(client)
    stop, answers = threading.Event(), []

    def others():
        while not stop.is_set():
            answers.append(client.complete(max_tokens=5, ignore_eos=True).status)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        for fields in WILD:
            ask = partial(client.complete, **fields, max_tokens=3)
            reply = in_time(ask, 4, clock=time.monotonic)
            assert reply.status in (200, 400, 500), reply.body
            if reply.status == 500:
                assert "grammar" in reply.error["message"]
    finally:
        stop.set()
        thread.join()
    assert set(answers) == {200}
    assert client.get("/health").status == 200
    assert restarts(client) == pid_before


def restarts(client):
    metrics = client.get("/metrics").body.decode()
    return [line for line in metrics.splitlines() if "restart" in line and not line.startswith("#")]


def test_n_and_usage(client):
    body = client.chat(guided_choice=["yes", "no"], n=3, temperature=1.0, max_tokens=20).json
    assert {choice["message"]["content"] for choice in body["choices"]} <= {"yes", "no"}
    assert body["usage"]["completion_tokens"] >= 3


def test_logprobs_have_an_entry_for_each_token(client):
    body = client.chat(
        guided_choice=["yes", "no"], logprobs=True, top_logprobs=2, max_tokens=20
    ).json
    (choice,) = body["choices"]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "".join(tokens) == choice["message"]["content"]
    json.dumps(body, allow_nan=False)
