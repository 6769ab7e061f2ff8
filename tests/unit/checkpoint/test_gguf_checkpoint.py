"""GGUF files as checkpoints, against the models they were written from and against transformers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from helpers.gguf import llama3_factors, tiny_llama, write_llama_gguf
from tokenmill.checkpoint.gguf_checkpoint import GGUFCheckpoint
from tokenmill.errors import CheckpointError
from tokenmill.quantization.dequantize import dequantize

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True, "mlp_bias": True},
    "head size of its own": {"head_dim": 32},
    "as many kv heads": {"num_key_value_heads": 4},
    "llama 3": {"rope_parameters": LLAMA3},
}

SAME_KEYS = [
    "model_type",
    "hidden_act",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "vocab_size",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "bos_token_id",
]


def open_tiny(tmp_path, model=None, tensor_type="F32", **contents) -> GGUFCheckpoint:
    path = write_llama_gguf(tmp_path / "tiny.gguf", model or tiny_llama(), tensor_type, **contents)
    return GGUFCheckpoint.open(path)


def with_biases(model):
    """Biases start at zero; a test of their order needs numbers."""
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_b105_every_weight_comes_back_under_its_name(tmp_path, variant):
    model = with_biases(tiny_llama(**VARIANTS[variant]))
    checkpoint = open_tiny(tmp_path, model)
    expected = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not (name == "lm_head.weight" and model.config.tie_word_embeddings)
    }
    assert dict(checkpoint.tensor_shapes) == {n: tuple(t.shape) for n, t in expected.items()}
    for name, tensor in expected.items():
        assert torch.equal(dequantize(checkpoint.read(name), torch.float32), tensor), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_equals_that_of_the_model(tmp_path, variant):
    model = tiny_llama(**VARIANTS[variant])
    config = open_tiny(tmp_path, model).config
    expected = model.config.to_dict()
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert {key: config[key] for key in SAME_KEYS} == {key: expected[key] for key in SAME_KEYS}
    assert config["rms_norm_eps"] == pytest.approx(model.config.rms_norm_eps, rel=1e-7)
    assert config["rope_theta"] == model.config.rope_parameters["rope_theta"]
    assert config["eos_token_id"] == [model.config.eos_token_id]


def test_config_equals_what_transformers_reads(tmp_path):
    checkpoint = open_tiny(tmp_path)
    theirs = load_gguf_checkpoint(str(checkpoint.path))["config"]
    shared = theirs.keys() & checkpoint.config.keys() - {"architectures", "eos_token_id"}
    assert len(shared) >= 10
    assert {key: checkpoint.config[key] for key in shared} == {key: theirs[key] for key in shared}
    assert checkpoint.config["eos_token_id"] == [theirs["eos_token_id"]]


def test_llama_3_factors_become_config(tmp_path):
    model = tiny_llama(rope_parameters=LLAMA3)
    checkpoint = open_tiny(tmp_path, model)
    assert checkpoint.config["rope_freq_factors"] == llama3_factors(model.config).tolist()
    assert "rope_freqs.weight" not in checkpoint.tensor_shapes


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
)
def test_rope_scaling(tmp_path, scaling):
    model = tiny_llama(rope_parameters={**scaling, "rope_theta": 10000.0})
    assert open_tiny(tmp_path, model).config["rope_scaling"] == scaling


def test_yarn_factors_mean_what_they_mean_to_transformers(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    model = tiny_llama(rope_parameters={**yarn, "rope_theta": 10000.0})
    _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](model.config, torch.device("cpu"))
    metadata = {
        "llama.rope.scaling.yarn_attn_factor": 1.0,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
        "llama.rope.scaling.yarn_beta_slow": 2.0,
    }
    scaling = open_tiny(tmp_path, model, metadata=metadata).config["rope_scaling"]
    assert scaling["attention_factor"] == pytest.approx(attention_factor)
    assert (scaling["beta_fast"], scaling["beta_slow"]) == (16.0, 2.0)


def test_without_scaling_there_is_no_key_for_it(tmp_path):
    assert not {"rope_scaling", "rope_freq_factors"} & open_tiny(tmp_path).config.keys()


def test_all_end_ids_are_listed_once(tmp_path):
    ids = {"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 2}
    assert open_tiny(tmp_path, metadata=ids).config["eos_token_id"] == [2, 1]


def test_tokenizer_data_holds_the_tokenizers_keys_only(tmp_path):
    metadata = open_tiny(tmp_path).tokenizer_data.gguf_metadata
    assert len(metadata["tokenizer.ggml.tokens"]) == 320
    assert metadata["tokenizer.ggml.merges"][2] == "Ġ the"
    assert all(key.startswith("tokenizer.") for key in metadata)


def test_b105_an_unknown_tensor_keeps_its_own_name(tmp_path):
    extra = {"mystery.weight": np.zeros((2, 3), np.float32)}
    shapes = open_tiny(tmp_path, extra_tensors=extra).tensor_shapes
    assert shapes["mystery.weight"] == (2, 3)


def test_num_bytes_counts_what_lies_in_the_file(tmp_path):
    checkpoint = open_tiny(tmp_path, tensor_type="Q8_0")
    stored = gguf.GGUFReader(checkpoint.path).tensors
    assert checkpoint.num_bytes == sum(int(tensor.n_bytes) for tensor in stored)


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path):
    checkpoint = open_tiny(tmp_path)
    before = checkpoint.path.read_bytes()
    checkpoint.read("model.norm.weight").data.zero_()
    assert checkpoint.path.read_bytes() == before


def test_after_close_nothing_is_read_but_tensors_live(tmp_path):
    checkpoint = open_tiny(tmp_path)
    norm = checkpoint.read("model.norm.weight")
    checkpoint.close()
    assert dequantize(norm, torch.float32).tolist() == [1.0] * 64
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*close"):
        checkpoint.read("model.norm.weight")


def test_a_missing_tensor_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.norm\.wait'.*Did you mean"):
        open_tiny(tmp_path).read("model.norm.wait")


BAD_PARAMETERS = {
    "general.architecture": ("mamba", r"'mamba'.*Supported: gemma2"),
    "llama.block_count": (5000, "5000"),
    "llama.embedding_length": (32, r"\(320, 64\)"),
    "llama.attention.head_count_kv": (3, "4 attention heads"),
    "llama.attention.head_count": (0, "at least 1"),
    "llama.attention.value_length": (8, "16"),
    "llama.attention.layer_norm_rms_epsilon": ("small", "'small'"),
    "llama.rope.dimension_count": (8, "16"),
    "llama.rope.freq_base": (float("nan"), "nan.*above 0"),
    "llama.expert_count": (2.5, "2.5.*whole number"),
    "llama.rope.scaling.type": ("spiral", "'spiral'.*none, linear or yarn"),
    "llama.rope.scaling.alpha": (2.0, "not supported"),
    "tokenizer.ggml.eos_token_id": ("two", "'two'.*token id"),
}


@pytest.mark.parametrize("key", BAD_PARAMETERS)
def test_a_parameter_that_cannot_be_is_named(tmp_path, key):
    value, words = BAD_PARAMETERS[key]
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf.*{key}.*{words}"):
        open_tiny(tmp_path, metadata={key: value})


def test_a_file_without_an_embedding_is_refused(tmp_path):
    path = tmp_path / "empty.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'token_embd\.weight' is missing"):
        GGUFCheckpoint.open(path)


def test_frequency_factors_of_another_size_are_refused(tmp_path):
    extra = {"rope_freqs.weight": np.ones(5, np.float32)}
    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight'.*\(5,\).*\(8,\)"):
        open_tiny(tmp_path, extra_tensors=extra)
