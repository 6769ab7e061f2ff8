"""`tokenmill serve --data-parallel-size`: who computes, who is told, and what a dead one costs."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.exposition import families, value
from helpers.fake_engine import FakeEngine
from helpers.live_server import LiveServer, chunks_of
from helpers.serve_process import ServeProcess
from tokenmill.engine.engine_stats import EngineStats, total


class TwoCores(FakeEngine):
    """Says what two cores would; computes as one."""

    def __init__(self):
        super().__init__(data_parallel_size=2)

    async def generate(self, *arguments, data_parallel_rank=None, **more):
        async for output in super().generate(
            *arguments, data_parallel_rank=data_parallel_rank, **more
        ):
            output.data_parallel_rank = data_parallel_rank or 0
            yield output

    async def stats(self):
        parts = [
            EngineStats(num_running=2, num_blocks=100, num_used_blocks=30, num_preemptions=1),
            EngineStats(num_waiting=1, num_blocks=100, num_restarts=2, is_healthy=False),
        ]
        return total(parts)


def test_a_replica_may_be_asked_for():
    with LiveServer(FakeEngine()) as server:
        server.complete(max_tokens=1)
        server.complete(max_tokens=1, data_parallel_rank=1)
        server.post("/v1/completions", {"prompt": "a"}, **{"X-data-parallel-rank": "2"})
        server.chat(max_tokens=1, stream=True, data_parallel_rank=0)
        server.complete(max_tokens=1, use_beam_search=True, n=2, data_parallel_rank=3)
        assert server.engine.ranks_asked[:4] == [None, 1, 2, 0]
        assert set(server.engine.ranks_asked[4:]) == {3}
        for wrong in ("-1", "x", "9" * 30):
            reply = server.post(
                "/v1/completions", {"prompt": "a"}, **{"X-data-parallel-rank": wrong}
            )
            assert reply.status == 400
            assert reply.error["param"] == "data_parallel_rank"


def test_each_core_has_its_label_and_load_tells_of_all():
    with LiveServer(TwoCores()) as server:
        assert server.complete(max_tokens=4, data_parallel_rank=1).status == 200
        found = families(server)
        load = server.get("/load").json
    assert value(found, "vllm:num_requests_running", engine="0") == 2
    assert value(found, "vllm:num_requests_waiting", engine="1") == 1
    assert value(found, "vllm:kv_cache_usage_perc", engine="0") == 0.3
    assert value(found, "vllm:num_preemptions_total", engine="0") == 1
    assert value(found, "tokenmill:core_restarts_total", engine="1") == 2
    ready = [value(found, "tokenmill:engine_ready", engine=rank) for rank in "01"]
    assert ready == [1, 0]
    for name in (
        "time_to_first_token_seconds_count",
        "request_success_total",
        "prompt_tokens_total",
    ):
        assert value(found, f"vllm:{name}", engine="0") == 0
        assert value(found, f"vllm:{name}", engine="1") > 0
    assert load["num_requests_running"] == 2
    assert load["num_requests_waiting"] == 1
    assert [each["healthy"] for each in load["engines"]] == [True, False]
    assert [each["num_requests_running"] for each in load["engines"]] == [2, 0]


def test_as_many_sequences_are_admitted_as_all_cores_hold():
    with LiveServer(TwoCores()) as server:
        assert server.state.admission.max_sequences == 2 * 8 + server.options.max_queue


NUM_STREAMS = 8
LONG = {"max_tokens": 120, "ignore_eos": True, "stream": True}


def fields(number):
    """Greedy and sampled; prompts of which some begin alike."""
    return {
        **LONG,
        "prompt": f"{'A fox and a dog. ' * 8} {number // 2}, {number}",
        "temperature": number % 2,
        "seed": number,
    }


def text_of(reply):
    return "".join(chunk["choices"][0]["text"] for chunk in chunks_of(reply))


@pytest.fixture(scope="module")
def served():
    with ServeProcess("--data-parallel-size", "2", "--enable-admin") as process:
        yield process


def cores(served):
    return [pid for pid in served.children() if len(os.listdir(f"/proc/{pid}/task")) > 1]


@pytest.mark.slow
def test_eight_streams_do_not_notice_that_a_core_is_killed(served):
    client = served.client()

    def stream(number):
        return text_of(client.complete(**fields(number)))

    undisturbed = [stream(number) for number in range(NUM_STREAMS)]
    first, second = cores(served)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(stream, number) for number in range(NUM_STREAMS)]
        while sum(e["num_requests_running"] > 0 for e in client.get("/load").json["engines"]) < 2:
            assert not any(each.done() for each in streams)
        os.kill(first, signal.SIGKILL)
        assert client.get("/ready").status == client.get("/health").status == 200
        assert [each.result(60) for each in streams] == undisturbed
    end = time.monotonic() + 60
    while value(families(client), "tokenmill:core_restarts_total") < 1:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert second in cores(served)


@pytest.mark.slow
def test_a_pin_outside_and_a_reset_of_all(served):
    client = served.client()
    reply = client.complete(data_parallel_rank=2)
    assert reply.status == 400
    assert "data_parallel_size=2" in reply.error["message"]
    assert client.post("/reset_prefix_cache", {}).status == 200
    for rank in (0, 1):
        reply = client.complete(**{**fields(1), "data_parallel_rank": rank, "max_tokens": 5})
        assert chunks_of(reply)[-1]["choices"][0]["finish_reason"] == "length"
    found = families(client)
    assert all(value(found, "vllm:time_to_first_token_seconds_count", engine=r) > 0 for r in "01")


@pytest.mark.slow
def test_the_end_of_a_server_is_the_end_of_its_cores(served):
    left = cores(served)
    served.signal(signal.SIGTERM)
    assert served.wait() == 0
    assert not any(os.path.exists(f"/proc/{pid}") for pid in left)
