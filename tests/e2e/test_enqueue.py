"""Requests that are queued now and run later, and what an `LLM` counts."""

from __future__ import annotations

import pytest

from helpers.tiny import tiny_llama
from tokenmill import LLM, SamplingParams
from tokenmill.entrypoints.offline_requests import RequestRunner
from tokenmill.errors import InvalidRequestError
from tokenmill.observe.metrics import Buckets, Counter, Gauge, Histogram, Vector, one_two_five

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[3 + number] * 20 for number in range(5)]


@pytest.fixture
def llm():
    with LLM(str(tiny_llama()), device="cpu", num_kv_blocks=64, block_size=16) as made:
        yield made


def texts(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_what_is_enqueued_is_run_when_it_is_waited_for(llm):
    expected = texts(llm.generate(PROMPTS, GREEDY))
    first = llm.enqueue(PROMPTS[:2], GREEDY)
    second = llm.enqueue(PROMPTS[2], GREEDY)
    assert len({*first, *second}) == 3
    assert texts(llm.generate(PROMPTS[3:], GREEDY)) == expected[3:]  # others run beside them
    llm.enqueue(PROMPTS[3:], [GREEDY, GREEDY])
    outputs = llm.wait_for_completion()
    assert texts(outputs) == expected
    assert [each.request_id for each in outputs][:3] == first + second
    assert llm.wait_for_completion() == []


def test_chats_can_be_enqueued(llm):
    chat = [{"role": "user", "content": "one two"}]
    expected = texts(llm.chat([chat, chat], GREEDY, add_generation_prompt=False))
    llm.enqueue_chat([chat, chat], GREEDY, add_generation_prompt=False)
    assert texts(llm.wait_for_completion()) == expected


def test_all_of_a_call_or_none_is_queued(llm):
    with pytest.raises(InvalidRequestError, match="prompt"):
        llm.enqueue([PROMPTS[0], []], GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.wait_for_completion() == []


def test_a_paused_engine_takes_requests_and_runs_none(llm):
    expected = texts(llm.generate(PROMPTS, GREEDY))
    llm.sleep(level=0, mode="keep")
    llm.enqueue(PROMPTS, GREEDY)
    with pytest.raises(InvalidRequestError, match="asleep"):
        llm.wait_for_completion()
    llm.wake_up(tags=["scheduling"])
    assert texts(llm.wait_for_completion()) == expected


def test_ends_that_came_meanwhile_are_given(llm):
    llm.enqueue(PROMPTS[:2], GREEDY)
    llm.sleep(level=0, mode="abort")
    llm.wake_up()
    llm.enqueue(PROMPTS[2], GREEDY)
    reasons = [each.outputs[0].finish_reason for each in llm.wait_for_completion()]
    assert reasons == ["abort", "abort", "length"]


def test_what_interrupts_waiting_leaves_requests_queued(llm, monkeypatch):
    expected = texts(llm.generate(PROMPTS, GREEDY))
    llm.enqueue(PROMPTS, GREEDY)

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RequestRunner, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.wait_for_completion()
    assert texts(llm.wait_for_completion()) == expected


def test_metrics_are_objects():
    settings = {"spec_method": "ngram", "spec_tokens": 2, "num_kv_blocks": 64, "block_size": 16}
    with LLM(str(tiny_llama()), device="cpu", **settings) as llm:
        llm.generate(PROMPTS, GREEDY)
        llm.generate(PROMPTS[0], GREEDY.replace(n=2, seed=1, temperature=1.0))
        (aborted,) = llm.enqueue(PROMPTS[1], GREEDY)
        llm.sleep(level=0)
        llm.wake_up()
        llm.wait_for_completion()
        by_name = {}
        for metric in llm.get_metrics():
            assert metric.name.startswith("vllm:")
            assert metric.labels["engine"] == "0"
            by_name.setdefault(metric.name.removeprefix("vllm:"), []).append(metric)
    assert aborted
    (prompt_tokens,) = by_name["prompt_tokens"]
    assert (type(prompt_tokens), prompt_tokens.value) == (Counter, 7 * 20)
    assert by_name["generation_tokens"][0].value == 5 * 6 + 2 * 6
    reasons = {each.labels["finished_reason"]: each.value for each in by_name["request_success"]}
    assert reasons == {"stop": 0, "length": 7, "repetition": 0, "abort": 1, "error": 0}
    (first,) = by_name["time_to_first_token_seconds"]
    assert (type(first), first.count, first.buckets["+Inf"]) == (Histogram, 6, 6)
    (lengths,) = by_name["request_generation_tokens"]
    assert (lengths.count, lengths.sum) == (7, 42)
    assert (lengths.buckets["5.0"], lengths.buckets["10.0"], lengths.buckets["20.0"]) == (1, 6, 7)
    (running,) = by_name["num_requests_running"]
    assert (type(running), running.value) == (Gauge, 0)
    (hits,) = by_name["prefix_cache_hits"]
    assert hits.value > 0
    (accepted,) = by_name["spec_decode_num_accepted_tokens_per_pos"]
    assert (type(accepted), len(accepted.values)) == (Vector, 2)


def test_a_value_counts_in_the_first_bucket_that_holds_it():
    buckets = Buckets((1, 2, 5))
    for value in (0, 1, 1.5, 5, 7):
        buckets.observe(value)
    histogram = buckets.histogram("x", {})
    assert histogram.buckets == {"1.0": 2, "2.0": 3, "5.0": 4, "+Inf": 5}
    assert (histogram.count, histogram.sum) == (5, 14.5)
    assert one_two_five(30) == [1, 2, 5, 10, 20, 50]
