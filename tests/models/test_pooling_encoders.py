"""BERT-like encoders on small random weights: transformers' vectors and scores, and the same bits
alone and in a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from helpers.pooling import (
    encoder,
    hidden_states,
    open_pooling,
    prompts,
    save,
    with_tokenizer,
)
from helpers.pooling_families import ENCODER_FAMILIES, EncoderFamily
from tokenmill import LLM, PoolingParams, SamplingParams
from tokenmill.errors import CheckpointError, ConfigError, GenerationError, InvalidRequestError
from tokenmill.kernels.gelu import gelu

PROMPTS = prompts(30, 70, 1, 64, 150)
BODIES = [family.body for family in ENCODER_FAMILIES]
WITH_TEXT = {"vocab_size": 400, "num_labels": 1}


def expected(model: Any, ids: list[int], pooling: str) -> np.ndarray:
    hidden = hidden_states(model, ids)
    pooled = hidden[0] if pooling == "cls" else hidden.mean(0)
    return (pooled / pooled.norm()).numpy()


def vectors(llm: LLM) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("architecture", BODIES)
def test_embeddings_equal_transformers(architecture: str, pooling: str, backend: str) -> None:
    model, path = encoder(architecture)
    settings = {"pooler_config": {"pooling_type": pooling}, "attention_backend": backend}
    with open_pooling(path, **settings) as llm:
        found = vectors(llm)
    for prompt, vector in zip(PROMPTS, found, strict=True):
        wanted = expected(model, prompt["prompt_token_ids"], pooling)
        np.testing.assert_allclose(vector, wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_the_same_bits_alone_and_in_a_batch(pooling: str, dtype: str) -> None:
    path = encoder("BertModel")[1]
    settings: dict[str, Any] = {"dtype": dtype, "pooler_config": {"pooling_type": pooling}}
    with open_pooling(path, max_num_seqs=1, **settings) as llm:
        alone = vectors(llm)
    with open_pooling(path, **settings) as llm:
        assert vectors(llm) == alone
        outputs = llm.embed(PROMPTS, use_tqdm=False)
        assert [output.outputs.embedding for output in outputs] == alone
        assert not any(output.num_cached_tokens for output in outputs)
    with open_pooling(path, num_threads=1, **settings) as llm:
        assert vectors(llm) == alone
    with open_pooling(path, max_num_batched_tokens=151, num_kv_blocks=6, **settings) as llm:
        assert vectors(llm) == alone  # a prompt is never cut, however small a step is


def test_a_small_model_in_bfloat16_is_close() -> None:
    model, path = encoder("BertModel")
    with open_pooling(path, dtype="bfloat16") as llm:
        for prompt, vector in zip(PROMPTS, vectors(llm), strict=True):
            wanted = expected(model, prompt["prompt_token_ids"], "cls")
            assert float(np.dot(vector, wanted)) > 0.999


@pytest.mark.parametrize("activation", ["gelu_new", "relu", "silu"])
def test_other_activations(activation: str) -> None:
    model, path = encoder("BertModel", hidden_act=activation)
    ids = PROMPTS[0]["prompt_token_ids"]
    with open_pooling(path) as llm:
        (output,) = llm.embed(ids, use_tqdm=False)
    np.testing.assert_allclose(output.outputs.embedding, expected(model, ids, "cls"), atol=1e-5)


def test_every_token_has_a_vector() -> None:
    model, path = encoder("BertModel")
    params = PoolingParams(use_activation=False)
    with open_pooling(path) as llm:
        outputs = llm.encode(PROMPTS, params, pooling_task="token_embed", use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        wanted = hidden_states(model, prompt["prompt_token_ids"])
        np.testing.assert_allclose(output.outputs.data, wanted, atol=1e-4)


@pytest.mark.parametrize("family", ENCODER_FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_classifiers_equal_transformers(family: EncoderFamily, num_labels: int) -> None:
    model, path = encoder(family.classifier, num_labels=num_labels)
    with open_pooling(path) as llm:
        logits = llm.classify(PROMPTS, PoolingParams(use_activation=False), use_tqdm=False)
        scores = llm.classify(PROMPTS, use_tqdm=False)
        (alone,) = llm.classify(PROMPTS[1], use_tqdm=False)
    assert alone.outputs.probs == scores[1].outputs.probs
    for prompt, logit, score in zip(PROMPTS, logits, scores, strict=True):
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt["prompt_token_ids"]])).logits[0]
        np.testing.assert_allclose(logit.outputs.probs, wanted, atol=1e-4)
        active = wanted.sigmoid() if num_labels == 1 else wanted.softmax(-1)
        np.testing.assert_allclose(score.outputs.probs, active, atol=1e-5)
        assert score.outputs.num_classes == num_labels


def test_a_cross_encoder_reads_pairs_with_their_types() -> None:
    model, path = encoder("BertForSequenceClassification", **WITH_TEXT)
    second = ["One two three", "The quick brown fox", "def add(a, b):"]
    with open_pooling(with_tokenizer(path), skip_tokenizer_init=False) as llm:
        tokenizer = llm.llm_engine.tokenizer
        assert tokenizer is not None
        outputs = llm.score("The lazy dog", second, use_tqdm=False)
        each = llm.score(["The lazy dog"] * 3, second, use_tqdm=False)
        assert [o.outputs.score for o in each] == [o.outputs.score for o in outputs]
        (one,) = llm.score("The lazy dog", second[1], use_tqdm=False)
        assert one.outputs.score == outputs[1].outputs.score
        with pytest.raises(InvalidRequestError, match=r"data_1 has 2 entries and data_2 has 3"):
            llm.score(["a", "b"], second)
        with pytest.raises(InvalidRequestError, match="data_2 is empty"):
            llm.score("a", [])
        keep = PoolingParams(truncate_prompt_tokens=4)
        (cut,) = llm.score("The lazy dog", second[0], keep, use_tqdm=False)
        assert len(cut.prompt_token_ids) == 4
    for text, output in zip(second, outputs, strict=True):
        first_ids, second_ids = tokenizer.encode("The lazy dog"), tokenizer.encode(text)
        assert output.prompt_token_ids == [*first_ids, *second_ids]
        types = [0] * len(first_ids) + [1] * len(second_ids)
        ids = torch.tensor([output.prompt_token_ids])
        with torch.inference_mode():
            logit = model(ids, token_type_ids=torch.tensor([types])).logits[0, 0]
            untyped = model(ids).logits[0, 0]
        assert abs(output.outputs.score - float(logit.sigmoid())) < 1e-5
        assert abs(float(logit) - float(untyped)) > 1e-3, "types must matter"


def test_scores_of_an_embedding_model_are_cosines() -> None:
    model, path = encoder("BertModel", vocab_size=400)
    with open_pooling(with_tokenizer(path), skip_tokenizer_init=False) as llm:
        outputs = llm.score("The fox", ["One two", "The fox"], use_tqdm=False)
        ids = [llm.llm_engine.tokenizer.encode(text) for text in ("The fox", "One two")]
    first, second = (expected(model, each, "cls") for each in ids)
    assert abs(outputs[0].outputs.score - float(first @ second)) < 1e-5
    assert abs(outputs[1].outputs.score - 1) < 1e-6


def test_what_an_encoder_refuses() -> None:
    path = encoder("BertModel")[1]
    with open_pooling(path) as llm:
        with pytest.raises(InvalidRequestError, match="generates nothing"):
            llm.generate([1, 2], SamplingParams(max_tokens=1))
        with pytest.raises(InvalidRequestError, match=r"151 tokens, but this model takes 150"):
            llm.embed([[5] * 151])
        with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
            llm.encode({"prompt": "a", "text_pair": "b"})
        assert llm.embed([1, 2], use_tqdm=False)[0].finished
    with pytest.raises(ConfigError, match=r"BertModel has no head for tokens"):
        open_pooling(path, runner="generate")
    with pytest.raises(ConfigError, match=r"no classification head"):
        open_pooling(path, convert="classify")
    with pytest.raises(ConfigError, match=r"position_embedding_type='relative_key'"):
        open_pooling(path, hf_overrides={"position_embedding_type": "relative_key"})
    three = encoder("BertForSequenceClassification", vocab_size=400, num_labels=3)[1]
    with (
        open_pooling(with_tokenizer(three), skip_tokenizer_init=False) as llm,
        pytest.raises(InvalidRequestError, match="this model has 3 classes"),
    ):
        llm.score("a", "b")


def test_a_model_that_gives_no_numbers_fails_alone() -> None:
    model, _ = encoder("BertModel", num_hidden_layers=1)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[7] = torch.nan
    path = save(model)

    with open_pooling(path) as llm:
        with pytest.raises(GenerationError, match="NaN or infinite"):
            llm.embed([[1, 7, 2]], use_tqdm=False)
        assert llm.embed([[1, 2]], use_tqdm=False)[0].finished


def test_gelu() -> None:
    x = torch.linspace(-12, 12, 4001)
    found, wanted = gelu(x), torch.nn.functional.gelu(x.double())
    assert ((found - wanted).abs() <= 2e-7 * (1 + x.abs())).all()
    for count in (1, 7, 33):
        assert torch.equal(gelu(x[:count]), found[:count])
    assert gelu(x.bfloat16()).dtype == torch.bfloat16


def test_a_directory_of_sentence_transformers() -> None:
    model, _ = encoder("BertModel")
    path = save(model, pooling="mean_tokens", normalize=False, max_seq_length=40)
    with open_pooling(path, max_model_len=None) as llm:
        assert llm.llm_engine.config.model.max_model_len == 40
        ids = PROMPTS[0]["prompt_token_ids"]
        (output,) = llm.embed(ids, use_tqdm=False)
    np.testing.assert_allclose(
        output.outputs.embedding, hidden_states(model, ids).mean(0), atol=1e-4
    )
    with pytest.raises(CheckpointError, match="pools by max_tokens, which is not supported"):
        open_pooling(save(model, pooling="max_tokens"))
