"""Sampling fields of requests on their way to the engine, and beam search through the server."""

from __future__ import annotations

import math

import pytest

from helpers.fake_engine import FakeEngine, Script
from helpers.live_server import LiveServer
from tokenmill import LogitsProcessor, RepetitionDetectionParams
from tokenmill.contracts.request import FinishReason


class Anything(LogitsProcessor):
    """Takes whatever it is given."""

    def for_request(self, params):
        return None


@pytest.fixture(scope="module")
def server():
    with LiveServer(FakeEngine(logits_processors=[Anything])) as server:
        yield server


PASSED_ON = [
    ("presence_penalty", -2, "presence_penalty", -2.0),
    ("frequency_penalty", 0.5, "frequency_penalty", 0.5),
    ("repetition_penalty", 1.3, "repetition_penalty", 1.3),
    ("logit_bias", {"5": 200, "7": -1}, "logit_bias", {5: 100.0, 7: -1.0}),
    ("allowed_token_ids", [3, 4, 3], "allowed_token_ids", [3, 4]),
    ("bad_words", ["a", "b"], "bad_words", ["a", "b"]),
    ("thinking_token_budget", -1, "thinking_token_budget", None),
    (
        "repetition_detection",
        {"max_pattern_size": 4, "min_count": 3},
        "repetition_detection",
        RepetitionDetectionParams(max_pattern_size=4, min_count=3),
    ),
    ("stream_interval", 4, "stream_interval", 4),
    ("vllm_xargs", {"a": [1, "b"], "c": 0.5}, "extra_args", {"a": [1, "b"], "c": 0.5}),
    ("min_tokens", 3, "min_tokens", 3),
]


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
@pytest.mark.parametrize(("name", "value", "parameter", "expected"), PASSED_ON)
def test_fields_reach_the_engine(server, endpoint, name, value, parameter, expected):
    reply = getattr(server, endpoint)(**{name: value, "max_tokens": 5})
    assert reply.status == 200, reply.body
    params = server.engine.calls[-1][1]
    assert getattr(params, parameter) == expected
    assert getattr(server, endpoint)(**{name: None}).status == 200


@pytest.mark.parametrize(
    "neutral",
    [
        {"presence_penalty": 0},
        {"logit_bias": {}},
        {"bad_words": []},
        {"logprob_token_ids": []},
        {"length_penalty": 1},
        {"use_beam_search": False},
        {"vllm_xargs": {}},
    ],
)
def test_values_that_ask_for_nothing(server, neutral):
    assert server.complete(**neutral).status == 200
    assert server.chat(**neutral).status == 200


def test_processors_arguments_need_a_processor():
    with LiveServer() as server:
        reply = server.complete(vllm_xargs={"a": 1})
        assert reply.status == 400
        assert reply.error["param"] == "vllm_xargs"
        reply = server.complete(logits_processors=["os:system"])
        assert reply.status == 400
        assert reply.error["param"] == "logits_processors"


def test_a_repetition_is_a_reason_to_end():
    engine = FakeEngine(lambda prompt, params: Script([5, 5], FinishReason.REPETITION))
    with LiveServer(engine) as server:
        for stream in (False, True):
            reply = server.complete(stream=stream)
            assert b'"finish_reason":"repetition"' in reply.body


def test_b027_ids_that_were_named(server):
    """The fake engine lists the best ones whatever is asked; their number is that of the ids."""
    reply = server.complete(logprob_token_ids=[10, 11, 5], max_tokens=2)
    params = server.engine.calls[-1][1]
    assert (params.logprobs, params.logprob_token_ids) == (3, [10, 11, 5])
    assert len(reply.json["choices"][0]["logprobs"]["top_logprobs"][0]) >= 3
    reply = server.chat(logprobs=True, logprob_token_ids=[10, 11, 5], max_tokens=2)
    assert len(reply.json["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3
    reply = server.chat(logprob_token_ids=[10, 11, 5])
    assert (reply.status, reply.error["param"]) == (400, "logprob_token_ids")
    reply = server.complete(logprob_token_ids=[10, 11, 5], logprobs=2)
    assert (reply.status, reply.error["param"]) == (400, "logprobs")


# ---- beam search ---------------------------------------------------------------------------------


def logprobs_of_beams(reply):
    return [
        sum(value for value in choice["logprobs"]["token_logprobs"])
        for choice in reply.json["choices"]
    ]


def test_beams_come_best_first(server):
    reply = server.complete(use_beam_search=True, n=3, max_tokens=4, logprobs=2)
    assert reply.status == 200, reply.body
    choices = reply.json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    scores = logprobs_of_beams(reply)
    assert scores == sorted(scores, reverse=True)
    # The fake engine holds id 10 for the best one in each step, with a half of the probability.
    assert scores[0] == pytest.approx(4 * math.log(1 / 2))
    assert len({choice["text"] for choice in choices}) == 3
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert reply.json["usage"]["completion_tokens"] == 12
    assert all(len(each) in (2, 3) for each in choices[0]["logprobs"]["top_logprobs"])


def test_beams_in_a_chat_and_of_several_prompts(server):
    reply = server.chat(use_beam_search=True, n=2, max_tokens=3, temperature=0)
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1]
    assert all(choice["message"]["content"] for choice in reply.json["choices"])
    reply = server.post(
        "/v1/completions",
        {"prompt": ["One", "two three"], "use_beam_search": True, "n": 2, "max_tokens": 2},
    )
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2, 3]


def test_all_requests_of_a_search_have_its_priority_and_salt(server):
    begin = len(server.engine.calls)
    reply = server.complete(
        use_beam_search=True, n=2, max_tokens=3, priority=5, cache_salt="s", timeout=30
    )
    assert reply.status == 200
    calls = server.engine.calls[begin:]
    assert len(calls) == 5
    for _, params, priority, salt, deadline in calls:
        assert (params.max_tokens, params.logprobs, params.greedy) == (1, 4, True)
        assert (priority, salt) == (5, "s")
        assert 0 < deadline <= 30


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"n": 11}, "n"),
        ({"stream": True}, "use_beam_search"),
        ({"temperature": 0.7}, "temperature"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"stop": ["x"]}, "stop"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"top_p": 0.5}, "top_p"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"response_format": {"type": "json_object"}}, "use_beam_search"),
    ],
)
def test_what_a_search_cannot_do_is_refused(server, fields, name):
    reply = server.complete(use_beam_search=True, max_tokens=2, **fields)
    assert (reply.status, reply.error["param"]) == (400, name), reply.body
    assert name in reply.error["message"]
    assert server.complete().status == 200


def test_a_search_that_fails_is_an_error():
    engine = FakeEngine(
        lambda prompt, params: (
            Script([5], FinishReason.ERROR, error="broken") if len(prompt) > 4 else Script([5, 5])
        )
    )
    with LiveServer(engine) as server:
        reply = server.complete(use_beam_search=True, n=2, max_tokens=8)
        assert reply.status == 500
        assert not engine.running
