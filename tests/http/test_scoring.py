"""/classify, /score and /rerank of classifiers and cross-encoders."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.live_server import LiveServer
from helpers.pooling import encoder, with_tokenizer
from helpers.pooling_engine import PoolingEngine

QUERY = "The lazy dog"
DOCUMENTS = ["One two three", "The quick brown fox", "def add(a, b):", "eight nine"]


def served(num_labels, **settings):
    architecture = "BertForSequenceClassification"
    model, path = encoder(architecture, vocab_size=400, num_labels=num_labels, **settings)
    return model, LiveServer(PoolingEngine(with_tokenizer(path)))


@pytest.fixture(scope="module")
def cross_encoder():
    model, server = served(1)
    with server:
        yield model, server


@pytest.fixture(scope="module")
def classifier():
    model, server = served(3)
    with server:
        yield model, server


def scores_of(model, server, pairs=None):
    """transformers' probabilities of each pair of texts."""
    tokenizer = server.engine.tokenizer
    found = []
    for first, second in pairs or [(QUERY, text) for text in DOCUMENTS]:
        parts = tokenizer.encode(first), tokenizer.encode(second)
        types = torch.tensor([[0] * len(parts[0]) + [1] * len(parts[1])])
        with torch.inference_mode():
            logits = model(torch.tensor([[*parts[0], *parts[1]]]), token_type_ids=types).logits
        found.append(float(logits[0, 0].sigmoid()))
    return found


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")]
)
@pytest.mark.parametrize("endpoint", ["/score", "/v1/score"])
def test_scores_of_pairs(cross_encoder, endpoint, names):
    model, server = cross_encoder
    reply = server.post(endpoint, {names[0]: QUERY, names[1]: DOCUMENTS})
    assert reply.status == 200, reply.body
    data = reply.json["data"]
    assert [(each["object"], each["index"]) for each in data] == [("score", i) for i in range(4)]
    wanted = scores_of(model, server)
    np.testing.assert_allclose([each["score"] for each in data], wanted, atol=1e-5)
    one_each = server.post(endpoint, {names[0]: [QUERY] * 4, names[1]: DOCUMENTS}).json
    assert one_each["data"] == data
    assert one_each["usage"] == reply.json["usage"]
    alone = server.post(endpoint, {names[0]: QUERY, names[1]: DOCUMENTS[2]}).json["data"]
    assert alone[0]["score"] == data[2]["score"]


@pytest.mark.parametrize("endpoint", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranks_of_documents(cross_encoder, endpoint):
    model, server = cross_encoder
    wanted = scores_of(model, server)
    order = sorted(range(4), key=lambda index: -wanted[index])
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    reply = server.post(endpoint, {"query": QUERY, "documents": documents})
    assert reply.status == 200, reply.body
    results = reply.json["results"]
    assert [each["index"] for each in results] == order
    assert [each["document"]["text"] for each in results] == [DOCUMENTS[i] for i in order]
    np.testing.assert_allclose(
        [each["relevance_score"] for each in results], sorted(wanted, reverse=True), atol=1e-5
    )
    fields = {"query": QUERY, "documents": documents, "top_n": 2, "return_documents": False}
    best = server.post(endpoint, fields).json["results"]
    assert [each["index"] for each in best] == order[:2]
    assert all("document" not in each for each in best)
    tokens = server.engine.tokenizer.encode
    assert reply.json["usage"]["total_tokens"] == sum(
        len(tokens(QUERY)) + len(tokens(text)) for text in DOCUMENTS
    )


@pytest.mark.parametrize(
    ("endpoint", "fields", "parameter"),
    [
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
        ("/score", {"text_1": "", "text_2": ""}, "text_2"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0].text"),
        ("/rerank", {"query": "a", "documents": ["b " * 300]}, "documents"),
        ("/v1/embeddings", {"input": "a"}, "model"),
    ],
)
def test_what_is_refused(cross_encoder, endpoint, fields, parameter):
    _, server = cross_encoder
    reply = server.post(endpoint, fields)
    assert reply.status == 400, reply.body
    assert reply.error["param"] == parameter
    assert server.get("/health").status == 200


def test_classes(classifier):
    model, server = classifier
    reply = server.post("/classify", {"input": DOCUMENTS})
    assert reply.status == 200, reply.body
    for text, each in zip(DOCUMENTS, reply.json["data"], strict=True):
        ids = server.engine.tokenizer.encode(text)
        with torch.inference_mode():
            wanted = model(torch.tensor([ids])).logits[0].softmax(-1)
        np.testing.assert_allclose(each["probs"], wanted, atol=1e-5)
        assert each["num_classes"] == 3
        assert each["label"] == f"LABEL_{int(wanted.argmax())}"
    raw = server.post("/classify", {"input": DOCUMENTS[0], "use_activation": False}).json
    logits = np.array(raw["data"][0]["probs"])
    shares = np.exp(logits - logits.max())
    np.testing.assert_allclose(shares / shares.sum(), reply.json["data"][0]["probs"], atol=1e-5)
    alone = server.post("/classify", {"input": DOCUMENTS[0]}).json["data"][0]
    assert alone["probs"] == reply.json["data"][0]["probs"]


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_a_classifier_of_several_classes_gives_no_one_score(classifier, endpoint, fields):
    _, server = classifier
    reply = server.post(endpoint, fields)
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert "3 classes" in reply.error["message"]
    reply = server.post("/v1/embeddings", {"input": "a"})
    assert "classify, token_classify" in reply.error["message"]
