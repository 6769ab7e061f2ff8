"""all-MiniLM-L6-v2 with its real weights: the vectors of transformers, as sentence-transformers
makes them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from helpers.live_server import LiveServer
from helpers.minilm import minilm_path
from helpers.pooling_engine import PoolingEngine
from tokenmill import LLM, PoolingParams

pytestmark = pytest.mark.slow

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "A fast fox leaps over a sleepy hound.",
    "Stock markets fell on Monday.",
    "Привет, мир! 你好 😀",
    "x",
    "word " * 400,
]
WHOLE = PoolingParams(truncate_prompt_tokens=-1)


@pytest.fixture(scope="module")
def expected():
    """(Ids, vector) of each text: mean of the hidden states, normalised, of 256 tokens at most."""
    path = minilm_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for text in TEXTS:
        inputs = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            mean = model(**inputs).last_hidden_state[0].mean(0)
        found.append((inputs["input_ids"][0].tolist(), (mean / mean.norm()).numpy()))
    return found


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_vectors_equal_transformers(expected, backend):
    with LLM(str(minilm_path()), dtype="float32", device="cpu", attention_backend=backend) as llm:
        assert llm.llm_engine.config.model.max_model_len == 256
        outputs = llm.embed(TEXTS, WHOLE, use_tqdm=False)
        alone = [llm.embed(text, WHOLE, use_tqdm=False)[0].outputs.embedding for text in TEXTS]
    assert [output.outputs.embedding for output in outputs] == alone
    for output, (ids, vector) in zip(outputs, expected, strict=True):
        assert output.prompt_token_ids == ids
        np.testing.assert_allclose(output.outputs.embedding, vector, atol=1e-5)


def test_in_bfloat16_it_says_the_same(expected):
    with LLM(str(minilm_path()), dtype="bfloat16", device="cpu") as llm:
        for output, (_, vector) in zip(
            llm.embed(TEXTS, WHOLE, use_tqdm=False), expected, strict=True
        ):
            assert float(np.dot(output.outputs.embedding, vector)) > 0.9995
        near, far = llm.score(TEXTS[0], TEXTS[1:3], use_tqdm=False)
    assert near.outputs.score > 0.5 > 0.2 > far.outputs.score


def test_served(expected):
    with LiveServer(PoolingEngine(minilm_path())) as server:
        reply = server.post("/v1/embeddings", {"input": TEXTS[:5]}).json
        for entry, (_, vector) in zip(reply["data"], expected[:5], strict=True):
            np.testing.assert_allclose(entry["embedding"], vector, atol=1e-5)
        ranking = server.post("/rerank", {"query": TEXTS[0], "documents": TEXTS[1:4]}).json
        assert ranking["results"][0]["index"] == 0
