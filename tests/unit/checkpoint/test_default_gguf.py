"""The default model's file, against the gguf library."""

from __future__ import annotations

import dataclasses

import gguf
import numpy as np
import pytest
import torch

from helpers.default_model import default_model_path
from helpers.gguf import assert_header_equals_library
from tokenmill.checkpoint.gguf_checkpoint import GGUFCheckpoint
from tokenmill.quantization.dequantize import dequantize

pytestmark = pytest.mark.model


def test_header_equals_the_librarys():
    assert_header_equals_library(default_model_path())


def test_values_of_a_layer_equal_the_librarys():
    checkpoint = GGUFCheckpoint.open(default_model_path())
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(default_model_path()).tensors}
    names = {
        "blk.7.attn_q.weight": "model.layers.7.self_attn.q_proj.weight",
        "blk.7.attn_v.weight": "model.layers.7.self_attn.v_proj.weight",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
        "blk.7.ffn_norm.weight": "model.layers.7.post_attention_layernorm.weight",
        "token_embd.weight": "model.embed_tokens.weight",
    }
    for gguf_name, name in names.items():
        as_stored = dataclasses.replace(checkpoint.read(name), head_permutation=None)
        tensor = theirs[gguf_name]
        last = slice(-2_000, None)  # of 49,152 rows of the vocabulary; the others have fewer
        expected = gguf.quants.dequantize(tensor.data[last], tensor.tensor_type)
        found = dequantize(as_stored, torch.float32).numpy()
        np.testing.assert_array_equal(found[last], expected)


def test_config():
    checkpoint = GGUFCheckpoint.open(default_model_path())
    assert checkpoint.config["num_hidden_layers"] == 30
    assert checkpoint.config["num_key_value_heads"] == 3
    assert checkpoint.config["vocab_size"] == 49152
    assert checkpoint.config["tie_word_embeddings"] is True
    assert checkpoint.config["eos_token_id"] == [2]
    assert len(checkpoint.tensor_shapes) == 272
