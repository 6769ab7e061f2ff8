"""POST /v1/completions: what clients send, and what they get."""

from __future__ import annotations

import pytest

from helpers.fake_engine import FakeEngine, Script, tiny_tokenizer
from helpers.live_server import LiveServer, chunks_of
from tokenmill.entrypoints.http import generation


@pytest.fixture(scope="module")
def server():
    with LiveServer() as server:
        yield server


def ids(text):
    return tiny_tokenizer().encode(text)


def test_shape(server):
    reply = server.complete(model="fake/model")
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    body = reply.json
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "fake/model"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "One two three",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    # The end token counts.
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_sixteen_tokens_unless_told_otherwise(server):
    reply = server.complete(prompt="One two " * 20)
    assert reply.json["usage"]["completion_tokens"] == 16
    assert reply.json["choices"][0]["finish_reason"] == "length"


def test_prompts_of_ids_and_lists(server):
    one, two = ids("One two"), ids("three four five")
    assert server.complete(prompt=one).json["choices"][0]["text"] == "One two"
    many = server.complete(prompt=[one, two]).json
    assert [choice["text"] for choice in many["choices"]] == ["One two", "three four five"]
    assert [choice["index"] for choice in many["choices"]] == [0, 1]
    assert many["usage"]["prompt_tokens"] == len(one) + len(two)
    mixed = server.complete(prompt=["One two", two]).json
    assert [choice["text"] for choice in mixed["choices"]] == ["One two", "three four five"]


def test_n_counts_a_prompt_once(server):
    body = server.complete(prompt=["One", "two three"], n=3, temperature=1).json
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"] for choice in body["choices"]] == ["One"] * 3 + ["two three"] * 3
    prompt = len(ids("One")) + len(ids("two three"))
    assert body["usage"]["prompt_tokens"] == prompt
    assert body["usage"]["completion_tokens"] == 3 * (prompt + 2)


def test_echo_puts_the_prompt_in_front(server):
    assert server.complete(echo=True).json["choices"][0]["text"] == "One two threeOne two three"
    by_ids = server.complete(prompt=ids("One two"), echo=True).json
    assert by_ids["choices"][0]["text"] == "One twoOne two"


def test_logprobs_are_parallel_arrays(server):
    choice = server.complete(logprobs=2).json["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["One", " two", " three", "<|im_end|>"]
    assert logprobs["text_offset"] == [0, 3, 7, 13]
    assert logprobs["token_logprobs"] == pytest.approx([-2.0794415] * 4)
    # Two best, and the chosen one, which is the third.
    assert [len(each) for each in logprobs["top_logprobs"]] == [3] * 4
    assert list(logprobs["top_logprobs"][0]) == ["(", ")", "One"]


def test_b027_logprobs_0_is_the_chosen_token_only(server):
    logprobs = server.complete(logprobs=0).json["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx([-2.0794415] * 4)
    assert logprobs["top_logprobs"] is None


def test_b027_more_than_the_limit_is_refused_with_it(server):
    reply = server.complete(logprobs=21)
    assert reply.status == 400
    assert reply.error["param"] == "logprobs"
    assert "20" in reply.error["message"]
    assert server.complete(prompt_logprobs=-1).error["param"] == "prompt_logprobs"


def test_echo_with_logprobs_covers_the_prompt(server):
    choice = server.complete(echo=True, logprobs=1).json["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]) == choice["text"] + "<|im_end|>"
    pieces = zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    assert all((choice["text"] + "<|im_end|>")[i:].startswith(token) for i, token in pieces)


def test_max_tokens_0_scores_a_prompt(server):
    body = server.complete(max_tokens=0, echo=True, logprobs=0).json
    choice = body["choices"][0]
    assert choice["text"] == "One two three"
    assert choice["logprobs"]["tokens"] == ["One", " two", " three"]
    assert choice["finish_reason"] == "length"
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert server.complete(max_tokens=0).error["param"] == "max_tokens"


def test_max_tokens_0_in_a_stream(server):
    reply = server.complete(
        max_tokens=0,
        echo=True,
        logprobs=0,
        stream=True,
        return_token_ids=True,
        stream_options={"include_usage": True},
    )
    *chunks, usage = chunks_of(reply)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "One two three"
    assert all(chunk["choices"][0]["token_ids"] == [] for chunk in chunks)
    assert usage["usage"]["completion_tokens"] == 0


def test_prompt_logprobs(server):
    choice = server.complete(prompt_logprobs=1).json["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [next(iter(each.values()))["decoded_token"] for each in others] == [" two", " three"]
    assert all({"logprob", "rank", "decoded_token"} == set(v) for v in others[0].values())
    refused = server.complete(prompt_logprobs=1, stream=True)
    assert (refused.status, refused.error["param"]) == (400, "prompt_logprobs")


def test_ids_are_returned_when_asked_for(server):
    choice = server.complete(return_token_ids=True).json["choices"][0]
    assert choice["prompt_token_ids"] == ids("One two three")
    assert choice["token_ids"] == [*ids("One two three"), 2]


def test_tokens_as_ids(server):
    tokens = server.complete(logprobs=0, return_tokens_as_token_ids=True).json["choices"][0][
        "logprobs"
    ]["tokens"]
    assert tokens == [f"token_id:{each}" for each in [*ids("One two three"), 2]]


def test_b100_truncation_keeps_the_last_tokens(server):
    long = "One two three four five " * 60
    refused = server.complete(prompt=long * 10)
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    reply = server.complete(prompt=long, truncate_prompt_tokens=16, echo=True, max_tokens=1).json
    assert reply["usage"]["prompt_tokens"] == 16
    assert reply["choices"][0]["text"].startswith(tiny_tokenizer().decode(ids(long)[-16:]))


def test_best_of_must_not_ask_for_a_choice(server):
    assert server.complete(best_of=1).status == 200
    assert server.complete(best_of=2).error["param"] == "best_of"


@pytest.mark.parametrize(
    ("prompt", "parameter"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt"),
        ([[]], "prompt"),
        ([1, "a"], "prompt"),
        ([1, [2]], "prompt"),
        ({"a": 1}, "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ([[1.5]], "prompt[0][0]"),
        ([[True]], "prompt[0][0]"),
        ("\ud800", "prompt"),
    ],
)
def test_b020_prompts_that_are_none(server, prompt, parameter):
    reply = server.complete(prompt=prompt)
    assert reply.status == 400
    assert reply.error["param"] == parameter
    assert server.get("/health").status == 200
    assert server.complete().status == 200


@pytest.mark.parametrize("bad", [-1, 10**6, 2**63 - 1, 2**70])
@pytest.mark.parametrize("batch", [False, True])
def test_b019_ids_have_both_bounds(server, bad, batch):
    prompt = [5, bad]
    reply = server.complete(prompt=[[5], prompt] if batch else prompt)
    assert reply.status == 400
    assert str(bad)[:20] in reply.error["message"]
    assert server.complete(stop_token_ids=[bad]).status == 400
    assert server.complete().status == 200


def test_special_tokens_may_be_left_out(server):
    reply = server.complete(prompt="One two", add_special_tokens=False, echo=True)
    assert reply.json["choices"][0]["text"] == "One twoOne two"


def test_priority_salt_and_deadline_reach_the_engine(server):
    server.complete(priority=3, cache_salt="pepper", timeout=5)
    *_, (_, _, priority, salt, deadline) = server.engine.calls
    assert (priority, salt, deadline) == (3, "pepper", 5)
    assert server.complete(cache_salt="").error["param"] == "cache_salt"
    assert server.complete(timeout=-1).error["param"] == "timeout"


def test_priority_needs_its_policy():
    with LiveServer(FakeEngine(scheduling_policy="fcfs")) as server:
        reply = server.complete(priority=1)
        assert (reply.status, reply.error["param"]) == (400, "priority")


def test_the_models_defaults_fill_in(server):
    server.engine.default_params = server.engine.default_params.replace(temperature=0.25, top_k=7)
    try:
        server.complete(temperature=0.5)
        params = server.engine.calls[-1][1]
        assert (params.temperature, params.top_k) == (0.5, 7)
    finally:
        server.engine.default_params = type(params)()


def test_timings_are_told_when_asked_for(server):
    assert "timings" not in server.complete().json
    timings = server.complete(timings=True).json["timings"]
    assert timings["prompt_n"] == 3
    assert timings["predicted_n"] == 4
    assert timings["queued_ms"] >= 0
    assert timings["cache_n"] is None  # told only where usage may tell it
    *_, last = chunks_of(server.complete(timings_per_token=True, stream=True))
    assert last["timings"]["predicted_n"] == 4


def test_b137_cached_tokens_are_told_only_if_switched_on():
    prompt = "One two three four five " * 8
    with LiveServer() as server:
        usage = server.complete(prompt=prompt).json["usage"]
        assert "prompt_tokens_details" not in usage
    with LiveServer(enable_prompt_tokens_details=True) as server:
        usage = server.complete(prompt=prompt, timings=True).json
        cached = len(ids(prompt)) // 16 * 16
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
        assert usage["timings"]["cache_n"] == cached


def test_a_failure_in_the_engine_is_a_500_with_its_reason():
    from tokenmill.contracts.request import FinishReason

    failing = Script([5, 6], FinishReason.ERROR, "logits were not finite.")
    with LiveServer(FakeEngine(lambda prompt, params: failing)) as server:
        reply = server.complete()
        assert reply.status == 500
        assert reply.error == {
            "message": "logits were not finite.",
            "type": "server_error",
            "param": None,
            "code": "generation_error",
        }
        many = server.complete(prompt=["One", "two"])
        assert many.status == 500
        assert not server.engine.running


def test_b056_two_bos_are_pointed_out_once(server, caplog, monkeypatch):
    monkeypatch.setattr(generation, "_warned", set())
    assert server.complete(prompt=[0, 5]).status == 200
    assert "two BOS" not in caplog.text
    for _ in range(3):
        assert server.complete(prompt=[0, 0, 5]).status == 200
    assert caplog.text.count("two BOS") == 1
