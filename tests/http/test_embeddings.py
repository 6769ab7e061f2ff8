"""Vectors over HTTP: /v1/embeddings through the official client and raw, /pooling, /score of an
embedding model, and what each kind of model refuses.
"""

from __future__ import annotations

import base64
import time

import numpy as np
import openai
import pytest

from helpers.live_server import LiveServer
from helpers.pooling import decoder, encoder, with_tokenizer
from helpers.pooling_engine import PoolingEngine
from helpers.serve_process import ServeProcess
from tokenmill.engine.serve_options import ServeOptions

TEXT = "The quick brown fox"
MANY = ["One two three", TEXT, "def add(a, b):"]
ENDPOINTS = {
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
}


@pytest.fixture(scope="module")
def path():
    return with_tokenizer(encoder("BertModel", vocab_size=400)[1])


@pytest.fixture(scope="module")
def server(path):
    with LiveServer(PoolingEngine(path)) as server:
        server.path = path
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def ids_of(server, text):
    return server.engine.tokenizer.encode(text)


def vector(server, given=TEXT, **fields):
    reply = server.post("/v1/embeddings", {"input": given, **fields})
    assert reply.status == 200, reply.body
    (entry,) = reply.json["data"]
    return entry["embedding"]


def test_b098_the_official_client_gets_the_raw_vector(server, client):
    """It asks for base64 by itself."""
    found = client.embeddings.create(model=server.engine.config.model.name, input=TEXT)
    raw = vector(server)
    assert len(raw) == 128
    np.testing.assert_allclose(found.data[0].embedding, raw, atol=1e-6)
    as_numbers = client.embeddings.create(
        model=server.engine.config.model.name, input=TEXT, encoding_format="float"
    )
    assert as_numbers.data[0].embedding == raw
    assert found.object == "list"
    assert found.data[0].object == "embedding"
    num_tokens = len(ids_of(server, TEXT))
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (num_tokens, num_tokens)


def test_b098_base64_is_little_endian_float32(server):
    decoded = np.frombuffer(base64.b64decode(vector(server, encoding_format="base64")), "<f4")
    np.testing.assert_array_equal(decoded, np.array(vector(server), np.float32))
    assert abs(float(decoded @ decoded) - 1) < 1e-5


@pytest.mark.parametrize("encoding", ["bytes", "base-64", ""])
@pytest.mark.parametrize("path_", ["/v1/embeddings", "/pooling"])
def test_b098_an_unknown_format_is_refused(server, path_, encoding):
    reply = server.post(path_, {"input": TEXT, "encoding_format": encoding})
    assert (reply.status, reply.error["param"]) == (400, "encoding_format")
    assert encoding in reply.error["message"]
    assert "float, base64" in reply.error["message"]


def test_b098_texts_and_ids_alone_and_in_lists(server):
    alone = [vector(server, text) for text in MANY]
    ids = [ids_of(server, text) for text in MANY]
    assert [vector(server, each) for each in ids] == alone
    for given in (MANY, ids, [MANY[0], ids[1], MANY[2]]):
        reply = server.post("/v1/embeddings", {"input": given}).json
        assert [entry["embedding"] for entry in reply["data"]] == alone
        assert [entry["index"] for entry in reply["data"]] == [0, 1, 2]
        assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_b098_dimensions_only_where_the_model_was_trained_for_them(server, path):
    for each in ("/v1/embeddings", "/pooling"):
        reply = server.post(each, {"input": TEXT, "dimensions": 16})
        assert (reply.status, reply.error["param"]) == (400, "dimensions")
    engine = PoolingEngine(path, hf_overrides={"matryoshka_dimensions": [16, 64]})
    with LiveServer(engine) as trained:
        short, whole = vector(trained, dimensions=16), vector(trained)
        cut = np.array(whole[:16])
        np.testing.assert_allclose(short, cut / np.linalg.norm(cut), atol=1e-6)
        for wrong in (17, 0, -1, 1 << 40, 4096):
            reply = trained.post("/v1/embeddings", {"input": TEXT, "dimensions": wrong})
            assert (reply.status, reply.error["param"]) == (400, "dimensions")
        assert trained.get("/health").status == 200


@pytest.mark.parametrize("path_", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize("bad", [-1, 400, 2**62])
def test_b019_ids_are_bounded(server, path_, bad):
    for given in ([1, bad], [[1, 2], [3, bad]]):
        reply = server.post(path_, {"input": given})
        assert (reply.status, reply.error["param"]) == (400, "input")
        assert str(bad) in reply.error["message"]
        assert "between 0 and 399" in reply.error["message"]
    assert server.get("/health").status == 200
    assert vector(server)


@pytest.mark.parametrize("given", ["", [], [""], [[]], ["a", ""], [[1], []]])
@pytest.mark.parametrize("path_", ["/v1/embeddings", "/pooling"])
def test_b020_empty_input_is_refused(server, path_, given):
    reply = server.post(path_, {"input": given})
    assert (reply.status, reply.error["param"]) == (400, "input"), reply.body
    assert server.get("/health").status == 200
    assert vector(server)


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({}, "input"),
        ({"input": 3}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "model": "other"}, "model"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "timeout": -1}, "timeout"),
        ({"input": "a", "cache_salt": ""}, "cache_salt"),
        ({"input": "a", "use_activation": 1}, "use_activation"),
        ({"input": "a " * 400}, "input"),
    ],
)
def test_what_else_is_refused(server, fields, parameter):
    reply = server.post("/v1/embeddings", fields)
    assert reply.status == (404 if parameter == "model" else 400), reply.body
    assert reply.error["param"] == parameter


def test_many_texts_run_in_turns(server):
    """More than the server would take on at once: they wait here, and keep their order."""
    texts = [f"{number} {TEXT}" for number in range(40)]
    few = {"max_num_seqs": 3}
    with LiveServer(PoolingEngine(server.path, **few), options=ServeOptions(max_queue=1)) as small:
        reply = small.post("/v1/embeddings", {"input": texts})
        assert reply.status == 200, reply.body
        found = [entry["embedding"] for entry in reply.json["data"]]
        assert found[17] == vector(small, texts[17])
        late = small.post("/v1/embeddings", {"input": [*texts, "a " * 400]})
        assert (late.status, late.error["param"]) == (400, "input")
        assert vector(small)
    assert found == [
        entry["embedding"] for entry in server.post("/v1/embeddings", {"input": texts}).json["data"]
    ]


def test_long_texts_can_be_cut(server):
    ids = ids_of(server, "a " * 400)
    assert vector(server, "a " * 400, truncate_prompt_tokens=-1) == vector(server, ids[:160])
    assert vector(server, TEXT, truncate_prompt_tokens=3) == vector(
        server, ids_of(server, TEXT)[:3]
    )


def test_pooling_gives_a_vector_or_one_for_each_token(server):
    reply = server.post("/pooling", {"input": [TEXT], "use_activation": False}).json
    assert reply["data"][0]["object"] == "pooling"
    plain = np.array(reply["data"][0]["data"])
    np.testing.assert_allclose(plain / np.linalg.norm(plain), vector(server), atol=1e-6)
    reply = server.post("/pooling", {"input": TEXT, "task": "token_embed"}).json
    tokens = np.array(reply["data"][0]["data"])
    assert tokens.shape == (len(ids_of(server, TEXT)), 128)
    np.testing.assert_allclose(tokens[0], vector(server), atol=1e-6)
    encoded = server.post(
        "/pooling", {"input": TEXT, "task": "token_embed", "encoding_format": "base64"}
    ).json["data"][0]["data"]
    found = np.frombuffer(base64.b64decode(encoded), "<f4").reshape(tokens.shape)
    np.testing.assert_array_equal(found, tokens.astype(np.float32))
    for task, hint in (("classify", "embed, token_embed"), ("encode", "'token_embed'")):
        reply = server.post("/pooling", {"input": TEXT, "task": task})
        assert (reply.status, reply.error["param"]) == (400, "task")
        assert hint in reply.error["message"]


def test_scores_and_ranks_are_cosines(server):
    vectors = [np.array(vector(server, text)) for text in (TEXT, *MANY)]
    wanted = [float(vectors[0] @ each) for each in vectors[1:]]
    scores = server.post("/v1/score", {"text_1": TEXT, "text_2": MANY}).json["data"]
    np.testing.assert_allclose([each["score"] for each in scores], wanted, atol=1e-6)
    reply = server.post("/rerank", {"query": TEXT, "documents": MANY, "top_n": 2}).json
    order = sorted(range(3), key=lambda index: -wanted[index])[:2]
    assert [each["index"] for each in reply["results"]] == order
    assert reply["results"][0]["document"] == {"text": TEXT}
    assert reply["results"][0]["relevance_score"] > 0.99999


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_a_pooling_model_generates_nothing(server, endpoint):
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "stream": True}
    reply = server.post(endpoint, body)
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert "generates nothing" in reply.error["message"]
    assert "/v1/embeddings" in reply.error["message"]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_model_that_generates_does_not_pool(endpoint):
    with LiveServer() as server:
        reply = server.post(endpoint, ENDPOINTS[endpoint])
        assert (reply.status, reply.error["param"]) == (400, "model")
        assert "generates" in reply.error["message"]
        assert "runner='pooling'" in reply.error["message"]
        assert server.complete().status == 200


def test_prompts_are_counted(server):
    def count():
        line = next(
            line
            for line in server.get("/metrics").body.decode().splitlines()
            if line.startswith("vllm:prompt_tokens_total")
        )
        return float(line.rpartition(" ")[2])

    before = count()
    vector(server)
    assert count() - before == len(ids_of(server, TEXT))


def test_served_from_its_own_process(server):
    """A decoder that pools its last token, behind `tokenmill serve`."""
    model = with_tokenizer(decoder("LlamaForCausalLM", vocab_size=400)[1])
    with ServeProcess("--runner", "pooling", model=model) as process:
        client = process.client()
        reply = client.post("/v1/embeddings", {"input": [*MANY, [5, 6, 7]]})
        assert reply.status == 200, reply.body
        vectors = [entry["embedding"] for entry in reply.json["data"]]
        assert {len(each) for each in vectors} == {128}
        alone = client.post("/v1/embeddings", {"input": MANY[1]}).json["data"][0]["embedding"]
        assert alone == vectors[1]
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{client.port}/v1", api_key="-", max_retries=0
        ) as official:
            found = official.embeddings.create(model=str(model), input=MANY)
        np.testing.assert_allclose([each.embedding for each in found.data], vectors[:3], atol=1e-6)
        assert client.post("/classify", {"input": "a"}).error["param"] == "model"
        assert client.complete().status == 400
        assert client.get("/health").status == 200
        check_that_leaving_ends_the_work(client)


def check_that_leaving_ends_the_work(client):
    """A client that goes away with most of its inputs undone."""
    many = [[3 + (number * 7 + i * 11) % 390 for i in range(400)] for number in range(2048)]
    connection = client.open("/v1/embeddings", {"input": many})
    until(lambda: client.get("/load").json["server_load"] == 1)
    connection.close()
    until(lambda: client.get("/load").json["server_load"] == 0)
    until(lambda: metric(client, "vllm:num_requests_waiting{") == 0)
    assert metric(client, "vllm:request_success_total", 'finished_reason="abort"') > 0
    assert client.post("/v1/embeddings", {"input": "a"}).status == 200


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


def metric(client, start, part=""):
    lines = client.get("/metrics").body.decode().splitlines()
    chosen = [line for line in lines if line.startswith(start) and part in line]
    assert chosen, start
    return sum(float(line.rpartition(" ")[2]) for line in chosen)
