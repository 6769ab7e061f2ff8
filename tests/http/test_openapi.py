"""/openapi.json tells the truth: requests made from it never break the server."""

from __future__ import annotations

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from helpers.fake_engine import FakeEngine, Script
from helpers.live_server import LiveServer
from helpers.pooling import encoder, with_tokenizer
from helpers.pooling_engine import PoolingEngine

POOLING = {
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
}
"""Answered by models that pool."""
# What a schema cannot say (ids in the vocabulary, prompts that fit) may be refused.
NOT_CHECKED = [schemathesis.checks.positive_data_acceptance]
BOUNDS = settings(
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server():
    engine = FakeEngine(lambda prompt, params: Script(prompt[:3]))
    with LiveServer(engine, enable_admin=True, enable_prompt_tokens_details=True) as server:
        yield server


@pytest.fixture(scope="module")
def description(server):
    return server.get("/openapi.json").json


def operations(server):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return [each.ok() for each in schema.get_all_operations()]


def check(operation, mode, num_examples):
    """Requests to one endpoint; what a mode calls negative must be refused."""

    @settings(BOUNDS, max_examples=num_examples)
    @given(operation.as_strategy(generation_mode=mode))
    def run(case):
        case.call_and_validate(timeout=20, excluded_checks=NOT_CHECKED)

    run()


def test_b015_b065_generated_requests_never_break_a_pooling_server():
    path = with_tokenizer(encoder("BertModel", vocab_size=400)[1])
    with LiveServer(PoolingEngine(path)) as server:
        found = [each for each in operations(server) if each.path in POOLING]
        assert len(found) == len(POOLING)
        for operation in found:
            if operation.path.startswith("/v") and operation.path != "/v1/embeddings":
                continue  # the same function under another name
            check(operation, GenerationMode.POSITIVE, 4)
            check(operation, GenerationMode.NEGATIVE, 4)
        assert server.post("/v1/embeddings", {"input": "a"}).status == 200


def test_b015_b065_generated_requests_never_break_the_server(server):
    found = [each for each in operations(server) if each.path not in POOLING]
    assert len(found) == 32
    for operation in found:
        num_examples = 6 if operation.body else 3
        check(operation, GenerationMode.POSITIVE, num_examples)
        if operation.body:
            check(operation, GenerationMode.NEGATIVE, num_examples)
    assert server.get("/health").status == 200
    assert not server.engine.running


@pytest.mark.slow
def test_many_generated_requests_never_break_the_server(server):
    for operation in operations(server):
        if operation.body:
            check(operation, GenerationMode.POSITIVE, 400)
            check(operation, GenerationMode.NEGATIVE, 400)


def test_every_reference_resolves(description):
    text = json.dumps(description)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in description["components"]["schemas"]
    assert description["openapi"].startswith("3.1")


def test_every_endpoint_is_described(description):
    assert set(description["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/responses/{response_id}/input_items",
        "/v1/models",
        "/v1/models/{model_id}",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/ping",
        "/version",
        "/load",
        "/metrics",
        "/reset_prefix_cache",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/pause",
        "/resume",
        "/is_paused",
        "/update_weights",
        "/get_weight_version",
        *POOLING,
    }


def test_fields_are_described_with_their_bounds(description):
    fields = description["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["temperature"]["maximum"] == 2
    assert "description" in fields["temperature"]
    assert description["components"]["schemas"]["CompletionRequest"]["required"] == ["prompt"]
    # What is known but not supported is there with the values that are taken.
    assert fields["suffix"]["enum"] == [None, ""]


def test_keys_are_described_where_they_are_needed(description):
    assert "security" not in description
    with LiveServer(api_key=["k"]) as server:
        assert server.get("/openapi.json").json["security"] == [{"key": []}]


def test_the_page_needs_nothing_from_elsewhere(server):
    reply = server.get("/docs")
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    page = reply.body.decode()
    assert "http://" not in page
    assert "https://" not in page
    for word in ("/v1/chat/completions", "max_completion_tokens", "truncate_prompt_tokens"):
        assert word in page
