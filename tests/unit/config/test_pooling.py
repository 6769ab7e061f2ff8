"""Which models pool, and how; and what that asks of the other settings."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from helpers.pooling import write_sentence_files
from tokenmill.checkpoint.sentence_transformers import SentenceModel, read_sentence_model
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.machine import Machine
from tokenmill.config.resolve import resolve
from tokenmill.errors import CheckpointError, ConfigError, InvalidRequestError
from tokenmill.pooling_params import PoolingParams

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def settle(
    architecture: str, path: Path | str = "/nowhere", config: Any = None, **args: Any
) -> EngineConfig:
    return resolve(
        EngineArgs(**args),
        path=str(path),
        config={**SIZES, "architectures": [architecture], **(config or {})},
        tensor_shapes={"weight": (64, 64)},
        tensor_formats={"weight": "F32"},
        machine=Machine(2, total_memory=8 << 30, available_memory=8 << 30),
    )


@pytest.mark.parametrize(
    ("architecture", "args", "pools_by"),
    [
        ("LlamaForCausalLM", {}, None),
        ("LlamaForCausalLM", {"runner": "generate"}, None),
        ("LlamaForCausalLM", {"convert": "none"}, None),
        ("GPT2LMHeadModel", {}, None),
        ("LlamaForCausalLM", {"runner": "pooling"}, "last"),
        ("LlamaForCausalLM", {"convert": "embed"}, "last"),
        ("LlamaModel", {}, "last"),
        ("LlamaModel", {"pooler_config": {"pooling_type": "MEAN"}}, "mean"),
        ("LlamaModel", {"pooler_config": {"seq_pooling_type": "CLS"}}, "cls"),
        ("BertModel", {}, "cls"),
        ("BertForSequenceClassification", {}, "cls"),
        ("Qwen3ForSequenceClassification", {}, "last"),
    ],
)
def test_which_models_pool(architecture: str, args: dict[str, Any], pools_by: str | None) -> None:
    pooling = settle(architecture, **args).model.pooling
    assert (pooling and pooling.pooling_type) == pools_by


def test_what_pooling_asks_of_the_other_settings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tokenmill"):
        settle("BertModel")
    assert "enable_chunked_prefill=False" in caplog.text
    last = settle("LlamaModel", async_scheduling=True)
    assert last.cache.enable_prefix_caching
    assert last.scheduler.enable_chunked_prefill
    assert last.scheduler.max_steps_in_flight == 1
    mean = settle("LlamaModel", pooler_config={"pooling_type": "mean"})
    assert not mean.cache.enable_prefix_caching
    assert mean.scheduler.enable_chunked_prefill
    encoder = settle("BertModel")
    assert not encoder.cache.enable_prefix_caching
    assert not encoder.scheduler.enable_chunked_prefill
    budget = encoder.scheduler.max_num_batched_tokens
    assert budget >= encoder.model.max_model_len == 512
    # All prompts of a step, each with a block that is not full.
    most = -(-budget // encoder.cache.block_size) + encoder.scheduler.max_num_seqs
    assert encoder.cache.num_blocks == most + 1
    assert encoder.cache.num_blocks < last.cache.num_blocks
    # RoBERTa's first positions are those up to its padding.
    assert settle("RobertaModel", config={"pad_token_id": 1}).model.max_model_len == 510
    with pytest.raises(ConfigError, match=r"max_model_len=511 is more than.*510"):
        settle("RobertaModel", config={"pad_token_id": 1}, max_model_len=511)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"id2label": {"0": "yes"}}, "sigmoid"),
        ({"num_labels": 3}, "softmax"),
        ({}, "softmax"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
         "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
         "sigmoid"),
    ],
)  # fmt: skip
def test_what_scores_go_through(config: dict[str, Any], activation: str) -> None:
    pooling = settle("BertForSequenceClassification", config=config).model.pooling
    assert pooling is not None
    assert pooling.activation == activation
    assert pooling.tasks == ("classify", "token_classify")
    assert len(pooling.labels) == pooling.size
    if "id2label" in config:
        assert pooling.labels == ("yes",)


@pytest.mark.parametrize(
    ("architecture", "args", "message"),
    [
        ("LlamaForCausalLM", {"runner": "pool"}, r"runner='pool' is not one of.*pooling"),
        ("LlamaForCausalLM", {"convert": "embedd"}, r"convert='embedd' is not.*'embed'"),
        ("LlamaForCausalLM", {"runner": "pooling", "convert": "none"}, "leaves it so"),
        ("LlamaForCausalLM", {"pooler_config": {"pooling_type": "cls"}}, "runner='pooling'"),
        ("BertModel", {"runner": "generate"}, "has no head for tokens"),
        ("BertModel", {"convert": "classify"}, "no classification head"),
        ("BertForSequenceClassification", {"convert": "embed"}, "is a classifier"),
        ("BertModel", {"pooler_config": {"pooling_type": "max"}}, r"'max' is not one of: last"),
        ("BertModel", {"pooler_config": {"pooling": "cls"}}, r"unknown key.*pooling_type"),
        ("BertModel", {"pooler_config": {"use_activation": 1}}, r"must be True or False"),
        ("BertModel", {"device": "cuda"}, r"device='cpu'"),
        ("BertModel", {"kv_cache_dtype": "int8"}, r"kv_cache_dtype='auto'"),
    ],
)
def test_what_is_refused(architecture: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settle(architecture, **args)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_bidirectional_attention": True}, "attention in both directions"),
        ({"is_causal": False}, "attention in both directions"),
        ({"matryoshka_dimensions": [65]}, "integers from 1 to hidden_size, 64"),
        ({"matryoshka_dimensions": 8}, "must be a list"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settle("LlamaModel", config=config)
    with pytest.raises(ConfigError, match="num_labels is 0"):
        settle("LlamaForSequenceClassification", config={"num_labels": 0})


def test_files_of_sentence_transformers(tmp_path: Path) -> None:
    write_sentence_files(tmp_path, pooling="mean_tokens", max_seq_length=77)
    assert read_sentence_model(tmp_path) == SentenceModel("mean", True, 77)
    config = settle("LlamaForCausalLM", tmp_path)  # they say that it is for embeddings
    assert config.model.pooling is not None
    assert config.model.pooling.pooling_type == "mean"
    assert config.model.pooling.use_activation
    assert config.model.max_model_len == 77
    assert settle("LlamaForCausalLM", tmp_path, max_model_len=100).model.max_model_len == 100
    assert settle("LlamaForCausalLM", tmp_path, runner="generate").model.pooling is None
    other = settle("LlamaForCausalLM", tmp_path, pooler_config={"use_activation": False})
    assert other.model.pooling is not None
    assert not other.model.pooling.use_activation
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    assert read_sentence_model(tmp_path) == SentenceModel("last", True, 77)
    assert read_sentence_model(tmp_path / "1_Pooling") is None


def test_damaged_files_of_sentence_transformers(tmp_path: Path) -> None:
    write_sentence_files(tmp_path, pooling="mean_tokens")
    pooling, modules = tmp_path / "1_Pooling" / "config.json", tmp_path / "modules.json"
    both = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
    for content, message in [
        (json.dumps(both), "pools by cls and mean"),
        ("{}", "pools by nothing"),
        ("[]", "must be an object"),
        ("{", "is not valid JSON"),
    ]:
        pooling.write_text(content)
        with pytest.raises(CheckpointError, match=message):
            read_sentence_model(tmp_path)
    pooling.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_sentence_model(tmp_path)
    modules.write_text('[{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]')
    with pytest.raises(CheckpointError, match=r"modules of type .*Dense.* are not supported"):
        read_sentence_model(tmp_path)
    modules.write_text("{}")
    with pytest.raises(CheckpointError, match="must be a list of objects"):
        read_sentence_model(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "encode"}, r"task='encode'.*Did you mean 'token_embed'"),
        ({"task": "score"}, r"Did you mean 'classify'"),
        ({"task": "embedd"}, r"Did you mean 'embed'"),
        ({"task": 3}, r"task=3 is not one of"),
        ({"dimensions": 0}, "dimensions=0: must be between 1 and"),
        ({"dimensions": True}, "dimensions=True: must be an integer"),
        ({"use_activation": "yes"}, "must be True or False"),
        ({"truncate_prompt_tokens": 0}, "at least 1, or -1"),
        ({"truncate_prompt_tokens": -2}, "must be between -1 and"),
        ({"normalise": True}, "normalise"),
    ],
)
def test_parameters_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        PoolingParams(**fields)
