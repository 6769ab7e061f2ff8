"""Two servers, one of which computes prompts for the other: the answers of one."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.live_router import LiveRouter
from helpers.live_server import chunks_of
from helpers.serve_process import ServeProcess

pytestmark = pytest.mark.slow  # tests/e2e/test_kv_peers.py has the same without servers

BLOCK = 32
PROMPT = "Once upon a time there was a miller who had one daughter, and she was as clever " * 2
FIELDS = {"prompt": PROMPT, "seed": 5, "temperature": 0.8, "max_tokens": 24, "logprobs": 3}
ASK = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


def serving(tmp_path_factory, role, **extra):
    secret = tmp_path_factory.getbasetemp() / "secret"
    secret.write_text("what only these servers know")
    config = {
        "kv_connector": "TCPConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"secret_file": str(secret), **extra},
    }
    return ServeProcess(
        "--kv-transfer-config",
        json.dumps(config),
        "--enable-prompt-tokens-details",
        TOKENMILL_CACHE=str(tmp_path_factory.getbasetemp() / "cache"),
    )


@pytest.fixture(scope="module")
def decode(tmp_path_factory):
    with serving(tmp_path_factory, "kv_consumer") as process:
        yield process


@pytest.fixture(scope="module")
def prefill(tmp_path_factory, decode):
    with serving(tmp_path_factory, "kv_producer", lease_seconds=1.0) as process:
        yield process


@pytest.fixture(scope="module")
def taker(decode):
    return decode.client()


@pytest.fixture(scope="module")
def giver(prefill):
    return prefill.client()


def salted(number, fields=FIELDS):
    """A request that shares the prefix cache with none of another number."""
    return {**fields, "cache_salt": f"salt {number}"}


def first_of(reply):
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]


def cached(reply):
    return reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def num_used_blocks(client):
    page = client.get("/metrics").body.decode()
    return float(re.search(r"^vllm:kv_cache_usage_perc.* (\S+)$", page, re.M)[1])


def wait_until_free(client, seconds=30.0):
    end = time.monotonic() + seconds
    while num_used_blocks(client):
        assert time.monotonic() < end, "the blocks are held for ever"
        time.sleep(0.02)


def test_completions_go_on_where_another_server_has_ended(giver, taker):
    alone = first_of(taker.post("/v1/completions", salted(1)))
    asked = giver.post("/v1/completions", {**salted(2), "max_tokens": 1, **ASK})
    held = asked.json["kv_transfer_params"]
    assert held["do_remote_prefill"] is True
    num_blocks = asked.json["usage"]["prompt_tokens"] // BLOCK
    assert len(held["remote_block_ids"]) == num_blocks > 2
    assert num_used_blocks(giver) > 0

    reply = taker.post("/v1/completions", {**salted(2), "kv_transfer_params": held})
    assert first_of(reply) == alone
    assert cached(reply) >= (num_blocks - 1) * BLOCK
    assert "kv_transfer_params" not in reply.json
    wait_until_free(giver)
    page = taker.get("/metrics").body.decode()
    loaded = re.search(r'by_source_total{.*source="external_kv_transfer"} (\S+)', page)
    assert float(loaded[1]) == cached(reply)
    hits = re.search(r"^vllm:external_prefix_cache_hits_total{.*} (\S+)$", page, re.M)
    assert float(hits[1]) == cached(reply)


def test_chats_and_streams_do_as_well(giver, taker):
    fields = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
    }
    alone = first_of(taker.post("/v1/chat/completions", salted(3, fields)))
    asked = giver.post("/v1/chat/completions", {**salted(4, fields), "max_tokens": 1, **ASK})
    held = {"kv_transfer_params": asked.json["kv_transfer_params"]}
    chunks = chunks_of(
        taker.post(
            "/v1/chat/completions",
            {
                **salted(4, fields),
                **held,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
    )
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == alone["message"]["content"]
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 2 * BLOCK


def test_the_router_brings_the_two_together(giver, taker, prefill, decode):
    alone = first_of(taker.post("/v1/completions", salted(5)))
    urls = [f"http://127.0.0.1:{client.port}" for client in (giver, taker)]
    with LiveRouter(prefill=urls[:1], decode=urls[1:]) as router:
        reply = router.post("/v1/completions", salted(6))
    assert first_of(reply) == alone
    assert cached(reply) > 2 * BLOCK


def test_many_at_once_do_not_disturb_each_other(giver, taker):
    prompts = [f"{number} {PROMPT[number:]}" for number in range(12)]
    fields = [salted(f"alone {n}", {**FIELDS, "prompt": p}) for n, p in enumerate(prompts)]
    alone = [first_of(taker.post("/v1/completions", each)) for each in fields]
    urls = [f"http://127.0.0.1:{client.port}" for client in (giver, taker)]
    with LiveRouter(prefill=urls[:1], decode=urls[1:]) as router, ThreadPoolExecutor(6) as pool:
        fields = [{**each, "cache_salt": f"pair {n}"} for n, each in enumerate(fields)]
        replies = list(pool.map(lambda each: router.post("/v1/completions", each), fields))
    assert [first_of(each) for each in replies] == alone
    assert sum(cached(each) > 2 * BLOCK for each in replies) > 6
    wait_until_free(giver)


def test_blocks_that_nobody_fetches_are_let_go_and_computed_elsewhere(giver, taker):
    alone = first_of(taker.post("/v1/completions", salted(7)))
    asked = giver.post("/v1/completions", {**salted(8), "max_tokens": 1, **ASK})
    wait_until_free(giver)  # the lease is a second
    held = {"kv_transfer_params": asked.json["kv_transfer_params"]}
    reply = taker.post("/v1/completions", {**salted(8), **held})
    assert first_of(reply) == alone
    assert cached(reply) == 0


@pytest.mark.parametrize(
    ("client", "fields", "words"),
    [
        ("taker", ASK, "gives KV"),
        ("giver", {"kv_transfer_params": {"do_remote_prefill": True}}, "remote_engine_id"),
        ("giver", {**ASK, "n": 2}, "n=2"),
        ("giver", {**ASK, "stream": True}, "stream=false"),
        ("giver", {**ASK, "prompt": ["a", "b"]}, "one prompt"),
        ("giver", {**ASK, "use_beam_search": True}, "use_beam_search"),
        ("giver", {"kv_transfer_params": {"do_remote_decode": "yes"}}, "true or false"),
        ("giver", {"kv_transfer_params": {**ASK["kv_transfer_params"], "x": 1}}, "not known"),
    ],
)
def test_what_makes_no_sense_is_refused(client, fields, words, giver, taker):
    reply = {"giver": giver, "taker": taker}[client].complete(**{"max_tokens": 1, **fields})
    assert reply.status == 400
    assert words in reply.error["message"]
    assert reply.error["param"] == "kv_transfer_params"


def test_a_prefill_server_that_dies_is_done_without(giver, taker, prefill):
    """The last test: the server is gone after it."""
    alone = first_of(taker.post("/v1/completions", salted(9)))
    asked = giver.post("/v1/completions", {**salted(10), "max_tokens": 1, **ASK})
    prefill.process.kill()
    prefill.process.wait()
    held = {"kv_transfer_params": asked.json["kv_transfer_params"]}
    reply = taker.post("/v1/completions", {**salted(10), **held})
    assert first_of(reply) == alone
