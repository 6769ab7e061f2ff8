"""/metrics: names that dashboards use, and numbers that add up."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers.fake_engine import FakeEngine, Script, tiny_tokenizer
from helpers.live_server import LiveServer
from tokenmill.config.engine_config import EncoderConfig
from tokenmill.contracts.request import FinishReason

NAMES = {
    # vLLM's
    "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason", "vllm:kv_cache_usage_perc", "vllm:cache_config_info",
    "vllm:engine_sleep_state",
    "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions",
    "vllm:corrupted_requests", "vllm:prompt_tokens", "vllm:prompt_tokens_by_source",
    "vllm:prompt_tokens_cached", "vllm:generation_tokens", "vllm:request_success",
    "vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:request_params_n",
    "vllm:request_params_max_tokens", "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds", "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds",
    "vllm:request_inference_time_seconds", "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds", "vllm:request_prefill_kv_computed_tokens",
    # their older names
    "vllm:gpu_cache_usage_perc", "vllm:gpu_prefix_cache_queries", "vllm:gpu_prefix_cache_hits",
    "vllm:time_per_output_token_seconds",
    # ours
    "tokenmill:requests_refused", "tokenmill:core_restarts", "tokenmill:engine_ready",
    "http_requests", "http_request_duration_seconds",
}  # fmt: skip


def families(server):
    reply = server.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    return {family.name: family for family in text_string_to_metric_families(reply.body.decode())}


def value(found, name, **labels):
    family = name.removesuffix("_total").removesuffix("_count").removesuffix("_sum")
    samples = [
        sample.value
        for sample in found[family].samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sum(samples)


def test_b124_names():
    with LiveServer() as server:
        found = set(families(server))
    assert {name for name in found if not name.startswith("process_")} == NAMES


def test_names_of_an_engine_with_an_encoder():
    engine = FakeEngine()
    engine.config = dataclasses.replace(engine.config, encoder=EncoderConfig(64, 256))
    with LiveServer(engine) as server:
        found = set(families(server))
    encoder = {"tokenmill:encoder_cache_queries", "tokenmill:encoder_cache_hits"}
    assert {name for name in found if not name.startswith("process_")} == NAMES | encoder


def test_names_and_numbers_of_speculation():
    with LiveServer(FakeEngine(spec_method="ngram", spec_tokens=3)) as server:
        found = families(server)
    drafts = {
        "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_accepted_tokens_per_pos",
    }  # fmt: skip
    assert {name for name in found if not name.startswith("process_")} == NAMES | drafts
    assert value(found, "vllm:spec_decode_num_drafts_total") == 10
    assert value(found, "vllm:spec_decode_num_draft_tokens_total") == 30
    assert value(found, "vllm:spec_decode_num_accepted_tokens_total") == 18
    by_position = [
        value(found, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(position))
        for position in range(4)
    ]
    assert by_position == [9, 6, 3, 0]


def test_tokens_count_when_they_are_made_whether_or_not_they_are_streamed():
    gates = {number: threading.Event() for number in (20, 40)}
    slow = FakeEngine(lambda prompt, params: Script([5] * 60, gates=gates))
    with LiveServer(slow) as server:
        asked = threading.Thread(target=lambda: server.complete(max_tokens=60))
        asked.start()

        def counted():
            return value(families(server), "vllm:generation_tokens_total")

        for number, gate in gates.items():
            server.wait_until(lambda number=number: counted() == number)
            gate.set()
        asked.join()
        assert counted() == 60


def test_b124_numbers_after_many_requests_add_up():
    def author(prompt, params):
        if len(prompt) == 1:
            return Script([5], FinishReason.ERROR, "broken.")
        return Script(prompt)

    with LiveServer(FakeEngine(author)) as server:
        before = families(server)
        for _ in range(3):
            server.complete()
            server.complete(stream=True)
        server.complete(max_tokens=1)
        server.complete(prompt=["One two", "three four"], n=2, temperature=1)
        server.complete(prompt=[5])
        server.complete(temperature=9)  # refused: no request
        server.complete(prompt="x " * 1000)
        found = families(server)

    def success(reason):
        return value(found, "vllm:request_success_total", finished_reason=reason)

    assert success("stop") == 6 + 4
    assert success("length") == 1
    assert success("error") == 1
    assert success("abort") == 0
    # Three tokens and the end, six times; one; the two prompts and the end, twice; the failed one.
    two = sum(len(tiny_tokenizer().encode(text)) for text in ("One two", "three four"))
    assert value(found, "vllm:generation_tokens_total") == 6 * 4 + 1 + 2 * (two + 2) + 1
    assert value(found, "vllm:prompt_tokens_total") == 7 * 3 + two + 1
    sources = value(found, "vllm:prompt_tokens_by_source_total")
    assert sources == value(found, "vllm:prompt_tokens_total")
    # One observation for each prompt.
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_params_n"):
        assert value(found, f"vllm:{name}_count") == 10
    # Gaps between the tokens of streams: two each, and none before the first.
    assert value(found, "vllm:inter_token_latency_seconds_count") == 3 * 2
    assert value(found, "vllm:time_per_output_token_seconds_count") == 3 * 2
    assert value(found, "vllm:num_requests_running") == 0
    assert value(found, "vllm:num_requests_waiting") == 0
    assert value(found, "vllm:prefix_cache_queries_total") == 100
    assert value(found, "vllm:prefix_cache_hits_total") == 25
    assert value(found, "vllm:num_preemptions_total") == 3
    completions = {"handler": "/v1/completions", "method": "POST"}
    assert value(found, "http_requests_total", **completions, status="200") == 8
    assert value(found, "http_requests_total", **completions, status="400") == 2
    assert value(found, "http_requests_total", **completions, status="500") == 1
    for name, family in before.items():
        if family.type == "counter" and not name.startswith("process_"):
            total = f"{name}_total"
            assert value(found, total) >= value(before, total)


def test_labels_are_not_the_clients():
    with LiveServer() as server:
        for path in ("/one", "/two", "/v1/models/three", "/v1/models/four"):
            server.get(path)
            server.request("BREW", path)
        server.complete(model="five")
        text = server.get("/metrics").body.decode()
    for word in ("/one", "/two", "three", "four", "five", "BREW"):
        assert word not in text
    assert 'handler="/v1/models/{model_id:path}"' in text


def test_openmetrics_for_who_asks():
    with LiveServer() as server:
        reply = server.get("/metrics", accept="application/openmetrics-text; version=1.0.0")
        assert reply.headers["content-type"].startswith("application/openmetrics-text")
        assert reply.body.endswith(b"# EOF\n")


@pytest.mark.parametrize("page", ["grafana-dashboard.json"])
def test_the_dashboard_asks_for_what_there_is(page):
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / page).read_text())
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    assert len(queries) > 10
    for query in queries:
        used = {word.split("{")[0] for word in query.replace("(", " ").split() if ":" in word}
        for name in used:
            for suffix in ("_total", "_bucket", "_sum", "_count"):
                name = name.removesuffix(suffix)
            assert name in NAMES, query
