"""Decoders that pool, on small random weights: transformers' vectors and scores, and the same bits
however a request is run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers.families import FAMILIES, Family
from helpers.pooling import decoder, hidden_states, open_pooling, prompts, randomized, save
from tokenmill import LLM, PoolingParams, SamplingParams
from tokenmill.errors import ConfigError, InvalidRequestError

LENGTHS = (30, 70, 1, 64, 150)
PROMPTS = prompts(*LENGTHS)
EMBEDDERS = ["LlamaModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]


def classifier_of(family: Family) -> str:
    """The class of transformers with a head for classes."""
    for ending in ("ForCausalLM", "LMHeadModel"):
        stem = family.architecture.removesuffix(ending)
        for name in (f"{stem}ForSequenceClassification", f"{stem}TextForSequenceClassification"):
            if hasattr(transformers, name):
                return name
    return ""


SCORING = [family for family in FAMILIES if classifier_of(family)]


def expected(model: Any, ids: list[int], pooling: str, *, normalize: bool = True) -> torch.Tensor:
    hidden = hidden_states(model, ids)
    pooled = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}[pooling]
    return pooled / pooled.norm() if normalize else pooled


def vectors(llm: LLM, params: PoolingParams | None = None) -> list[list[float]]:
    outputs = llm.embed(PROMPTS, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [
        prompt["prompt_token_ids"] for prompt in PROMPTS
    ]
    return [output.outputs.embedding for output in outputs]


@pytest.mark.parametrize("headless", [False, True], ids=["causal", "body"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_embeds(family: Family, headless: bool) -> None:
    """With the head that it was trained with, and saved without."""
    config = getattr(transformers, family.config_class)(
        **family.settings(), attn_implementation="eager"
    )
    model = randomized(getattr(transformers, family.architecture)(config), scale=0.1)
    path = save(model.base_model if headless else model)
    with open_pooling(path, runner="auto" if headless else "pooling") as llm:
        found = vectors(llm)
        assert vectors(llm) == found
    for prompt, vector in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt["prompt_token_ids"]])
        with torch.inference_mode():
            last = model.base_model(ids).last_hidden_state[0, -1]
        torch.testing.assert_close(torch.tensor(vector), last / last.norm(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", SCORING, ids=lambda family: family.name)
def test_every_family_scores(family: Family) -> None:
    config = getattr(transformers, family.config_class)(
        **family.settings(), attn_implementation="eager", num_labels=3
    )
    model = randomized(getattr(transformers, classifier_of(family))(config), scale=0.1)
    with open_pooling(save(model)) as llm:
        found = llm.classify(PROMPTS, use_tqdm=False)
    for prompt, output in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt["prompt_token_ids"]])
        with torch.inference_mode():
            wanted = model.score(model.base_model(ids).last_hidden_state[0, -1]).softmax(-1)
        np.testing.assert_allclose(output.outputs.probs, wanted, atol=1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
@pytest.mark.parametrize("architecture", EMBEDDERS)
def test_embeddings_equal_transformers(architecture: str, pooling: str) -> None:
    model, path = decoder(architecture)
    with open_pooling(path, runner="pooling", pooler_config={"pooling_type": pooling}) as llm:
        found = vectors(llm)
        plain = vectors(llm, PoolingParams(use_activation=False))
    for prompt, vector, raw in zip(PROMPTS, found, plain, strict=True):
        ids = prompt["prompt_token_ids"]
        torch.testing.assert_close(
            torch.tensor(vector), expected(model, ids, pooling), atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            torch.tensor(raw), expected(model, ids, pooling, normalize=False), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_the_same_bits_however_requests_are_run(pooling: str, dtype: str) -> None:
    path = decoder("LlamaForCausalLM")[1]
    settings: dict[str, Any] = {
        "runner": "pooling",
        "dtype": dtype,
        "pooler_config": {"pooling_type": pooling},
    }
    with open_pooling(path, max_num_seqs=1, enable_prefix_caching=False, **settings) as llm:
        alone = vectors(llm)
    with open_pooling(path, **settings) as llm:
        assert vectors(llm) == alone  # at once
        outputs = llm.embed(PROMPTS, use_tqdm=False)
        assert [output.outputs.embedding for output in outputs] == alone  # from the cache
        # A prefix from the cache brings no hidden states: only the last token can do with it.
        assert (sum(output.num_cached_tokens for output in outputs) > 0) == (pooling == "last")
    with open_pooling(path, max_num_batched_tokens=7, max_num_seqs=5, **settings) as llm:
        assert vectors(llm) == alone  # in pieces
    with open_pooling(path, check_graphs=True, **settings) as llm:
        assert vectors(llm) == alone  # recorded, and compared with the direct pass
    with open_pooling(path, attention_backend="reference", **settings) as llm:
        np.testing.assert_allclose(vectors(llm), alone, atol=1e-5 if dtype == "float32" else 0.05)


def test_in_a_pool_that_holds_one_prompt() -> None:
    path = decoder("LlamaForCausalLM")[1]
    settings: dict[str, Any] = {"runner": "pooling", "pooler_config": {"pooling_type": "mean"}}
    with open_pooling(path, **settings) as llm:
        alone = vectors(llm)
    settings |= {"num_kv_blocks": 6, "max_num_batched_tokens": 48, "block_size": 32}
    with open_pooling(path, **settings) as llm:
        assert vectors(llm) == alone


def test_every_token_has_a_vector() -> None:
    model, path = decoder("LlamaModel")
    with open_pooling(path, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        for _ in range(2):  # the second time the cache has prefixes, which are not read
            outputs = llm.encode(PROMPTS, pooling_task="token_embed", use_tqdm=False)
            assert all(output.num_cached_tokens == 0 for output in outputs)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        hidden = hidden_states(model, prompt["prompt_token_ids"])
        assert output.outputs.data.dtype == np.float32
        np.testing.assert_allclose(
            output.outputs.data, hidden / hidden.norm(dim=-1, keepdim=True), atol=1e-5
        )


def test_shorter_embeddings_where_the_model_was_trained_so() -> None:
    model, path = decoder("LlamaModel")
    ids = PROMPTS[1]["prompt_token_ids"]
    overrides = {"matryoshka_dimensions": [16, 64]}
    with open_pooling(path, hf_overrides=overrides) as llm:
        (output,) = llm.embed(ids, PoolingParams(dimensions=16), use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="dimensions=17 is not one of: 16, 64"):
            llm.embed(ids, PoolingParams(dimensions=17))
    short = hidden_states(model, ids)[-1, :16]
    np.testing.assert_allclose(output.outputs.embedding, short / short.norm(), atol=1e-5)
    with open_pooling(path, hf_overrides={"is_matryoshka": True}) as llm:
        (output,) = llm.embed(ids, PoolingParams(dimensions=17), use_tqdm=False)
        assert output.outputs.hidden_size == 17
        with pytest.raises(InvalidRequestError, match=r"dimensions=129 must be at most 128"):
            llm.embed(ids, PoolingParams(dimensions=129))
    with open_pooling(path) as llm:
        with pytest.raises(InvalidRequestError, match=r"not trained for shorter.*length is 128"):
            llm.embed(ids, PoolingParams(dimensions=16))
        assert llm.embed(ids, use_tqdm=False)[0].outputs.hidden_size == 128


@pytest.mark.parametrize("num_labels", [1, 3])
def test_classifiers_equal_transformers(num_labels: int) -> None:
    model, path = decoder("LlamaForSequenceClassification", num_labels=num_labels)
    with open_pooling(path) as llm:
        scores = llm.classify(PROMPTS, use_tqdm=False)
        logits = llm.classify(PROMPTS, PoolingParams(use_activation=False), use_tqdm=False)
        tokens = llm.encode(PROMPTS, pooling_task="token_classify", use_tqdm=False)
    for prompt, score, logit, token in zip(PROMPTS, scores, logits, tokens, strict=True):
        hidden = hidden_states(model, prompt["prompt_token_ids"])
        with torch.inference_mode():
            wanted = model.score(hidden[-1])
        np.testing.assert_allclose(logit.outputs.probs, wanted, atol=1e-4)
        active = wanted.sigmoid() if num_labels == 1 else wanted.softmax(-1)
        np.testing.assert_allclose(score.outputs.probs, active, atol=1e-5)
        np.testing.assert_array_equal(token.outputs.data[-1], np.float32(score.outputs.probs))
        assert token.outputs.data.shape == (len(hidden), num_labels)


def test_a_prompt_may_fill_the_context() -> None:
    model, path = decoder("LlamaModel")
    (prompt,) = prompts(150)
    with open_pooling(path) as llm:
        (output,) = llm.embed(prompt, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match=r"151 tokens, but this model takes 150"):
            llm.embed([prompt["prompt_token_ids"] + [3]])
        params = PoolingParams(truncate_prompt_tokens=-1)
        (cut,) = llm.embed([prompt["prompt_token_ids"] + [3]], params, use_tqdm=False)
    assert cut.outputs.embedding == output.outputs.embedding
    np.testing.assert_allclose(
        output.outputs.embedding, expected(model, prompt["prompt_token_ids"], "last"), atol=1e-5
    )


def test_each_kind_of_engine_refuses_what_it_cannot_do() -> None:
    path = decoder("LlamaForCausalLM")[1]
    with open_pooling(path) as llm:  # without a word, a model with a head generates
        for call in (llm.embed, llm.encode, llm.classify):
            with pytest.raises(InvalidRequestError, match=r"needs a pooling model.*runner='pool"):
                call([1, 2])
        with pytest.raises(InvalidRequestError, match=r"score needs a pooling model"):
            llm.score("a", "b")
        with pytest.raises(InvalidRequestError, match="generates and does not pool"):
            llm.llm_engine.add_request("0", [1, 2], PoolingParams())
        (output,) = llm.generate([1, 2], SamplingParams(max_tokens=2), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 2
    with open_pooling(path, convert="embed") as llm:
        with pytest.raises(InvalidRequestError, match=r"generates nothing.*embed, token_embed"):
            llm.generate([1, 2], SamplingParams(max_tokens=2))
        with pytest.raises(InvalidRequestError, match=r"task='classify' is not what"):
            llm.classify([1, 2])
        assert llm.embed([1, 2], use_tqdm=False)[0].finished
    with pytest.raises(ConfigError, match="LlamaModel has no head for tokens"):
        open_pooling(decoder("LlamaModel")[1], runner="generate")


@pytest.mark.parametrize("bad", [-1, 97, 2**62])
def test_ids_are_bounded(bad: int) -> None:
    """B019, offline."""
    with open_pooling(decoder("LlamaModel")[1]) as llm:
        for prompt in ([[1, 2], [3, bad]], [bad]):
            with pytest.raises(ValueError, match=rf"holds {bad}.*between 0 and 96"):
                llm.embed(prompt)
        assert llm.embed([1, 2], use_tqdm=False)[0].finished


@pytest.mark.parametrize("prompt", [[[]], "", [""], {"prompt_token_ids": []}])
def test_empty_prompts_are_refused(prompt: Any) -> None:
    """B020, offline."""
    with open_pooling(decoder("LlamaModel")[1]) as llm:
        with pytest.raises(ValueError, match=r"no tokens|no tokenizer"):
            llm.embed(prompt)
        assert llm.embed([1, 2], use_tqdm=False)[0].finished
