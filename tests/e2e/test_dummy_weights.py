"""An engine on random weights, from nothing but a config.json."""

from __future__ import annotations

import json

import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.errors import ConfigError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def generated(directory, **engine_args):
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "num_kv_blocks": 8}
    with LLM(directory, **(settings | engine_args)) as llm:
        params = SamplingParams(temperature=0, max_tokens=16)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_seed_gives_the_same_tokens(directory, dtype):
    first = generated(directory, dtype=dtype)
    assert [len(ids) for ids in first] == [16, 16]
    assert generated(directory, dtype=dtype) == first
    assert generated(directory, dtype=dtype, seed=1) != first


def test_overrides_shape_the_weights(directory):
    with LLM(
        directory,
        load_format="dummy",
        skip_tokenizer_init=True,
        num_kv_blocks=8,
        hf_overrides={"num_hidden_layers": 5, "vocab_size": 77},
    ) as llm:
        assert llm.llm_engine.config.model.vocab_size == 77
        outputs = llm.generate([PROMPTS[0]], SamplingParams(temperature=0), use_tqdm=False)
    assert max(outputs[0].outputs[0].token_ids) < 77


def test_an_unknown_format_is_refused(directory):
    with pytest.raises(
        ConfigError, match=r"load_format='dumy' is not one of: auto, dummy\..*'dummy'"
    ):
        generated(directory, load_format="dumy")
