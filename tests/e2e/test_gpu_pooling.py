"""Models that pool on the parts of a GPU: the CPU's vectors and scores, and the same bits however
requests are run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.gpu_engine import gpu_engine
from helpers.pooling import decoder, encoder, open_pooling, prompts, with_tokenizer
from tokenmill import PoolingParams
from tokenmill.worker.graphs.cuda import GraphSizes

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered", "ignore:invalid value encountered"
)
PROMPTS: list[Any] = list(prompts(9, 1, 3))
PAIRS: list[Any] = [
    {"prompt": "The lazy dog", "text_pair": "One two three"},
    "The quick brown fox",
    {"prompt": "One", "text_pair": "The lazy dog"},
]
SETTINGS = {"dtype": "float32", "num_kv_blocks": 24, "max_model_len": 32, "max_num_seqs": 4}
PADDED = GraphSizes(decode=(2,), mixed=(8,), max_num_seqs=4, max_model_len=32)


def run(engine: Any, given: list[Any], params: PoolingParams) -> list[np.ndarray]:
    """Results in the order of the prompts."""
    for number, prompt in enumerate(given):
        engine.add_request(str(number), prompt, params)
    ended = {}
    while engine.has_unfinished_requests():
        ended.update({output.request_id: output.pooled for output in engine.step()})
    return [ended[str(number)] for number in range(len(given))]


def on_the_gpu(path: Path, given: list[Any], task: str, **settings: Any) -> list[np.ndarray]:
    return run(gpu_engine(path, **(SETTINGS | settings)), given, PoolingParams(task=task))


def check(
    found: list[np.ndarray], path: Path, given: list[Any], task: str, **settings: Any
) -> None:
    """Beside the CPU's."""
    settings = {"skip_tokenizer_init": True, "max_model_len": 32} | settings
    with open_pooling(path, **settings) as llm:
        wanted = run(llm.llm_engine, given, PoolingParams(task=task))
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


@pytest.mark.parametrize(
    "pooling", ["mean", *(pytest.param(other, marks=pytest.mark.slow) for other in ("last", "cls"))]
)
def test_a_decoder_embeds(pooling: str) -> None:
    path = decoder("LlamaForCausalLM", num_hidden_layers=1)[1]
    settings: dict[str, Any] = {"runner": "pooling", "pooler_config": {"pooling_type": pooling}}
    found = on_the_gpu(path, PROMPTS, "embed", **settings)
    check(found, path, PROMPTS, "embed", **settings)
    (alone,) = on_the_gpu(path, PROMPTS[:1], "embed", **settings)
    assert np.array_equal(alone, found[0])
    cut = {"max_num_batched_tokens": 6, "sizes": PADDED}
    assert all(map(np.array_equal, on_the_gpu(path, PROMPTS, "embed", **settings, **cut), found))


@pytest.mark.parametrize(
    "task", ["classify", pytest.param("token_classify", marks=pytest.mark.slow)]
)
def test_a_decoder_scores(task: str) -> None:
    path = decoder("Qwen3ForSequenceClassification", num_labels=3, num_hidden_layers=1)[1]
    found = on_the_gpu(path, PROMPTS, task)
    shapes = [(3,)] * 3 if task == "classify" else [(9, 3), (1, 3), (3, 3)]
    assert [each.shape for each in found] == shapes
    check(found, path, PROMPTS, task)


def test_a_cross_encoder_scores_pairs() -> None:
    """Tokens see those behind them, and know their text; a prompt is never cut."""
    path = with_tokenizer(encoder("BertForSequenceClassification", vocab_size=400, num_labels=2)[1])
    found = on_the_gpu(path, PAIRS, "classify", with_tokenizer=True)
    check(found, path, PAIRS, "classify", skip_tokenizer_init=False)
    (alone,) = on_the_gpu(path, PAIRS[2:], "classify", with_tokenizer=True)
    assert np.array_equal(alone, found[2])
    turned = {"prompt": PAIRS[2]["text_pair"], "text_pair": PAIRS[2]["prompt"]}
    (other,) = on_the_gpu(path, [turned], "classify", with_tokenizer=True)
    assert not np.allclose(other, alone, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["BertModel", "RobertaModel"])
@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_an_encoder_embeds(architecture: str, task: str) -> None:
    path = encoder(architecture)[1]
    found = on_the_gpu(path, PROMPTS, task)
    check(found, path, PROMPTS, task)
    (alone,) = on_the_gpu(path, PROMPTS[:1], task)
    assert np.array_equal(alone, found[0])
