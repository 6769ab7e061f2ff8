"""The default model in transformers, built from the dequantised weights."""

from __future__ import annotations

import functools

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.default_model import default_model_path

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


@functools.cache
def reference_model() -> LlamaForCausalLM:
    """float32, read with the gguf library alone, none of our code."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.model.rotary_emb.__init__(config)
    state = {
        _hf_name(tensor.name): _dequantised(tensor)
        for tensor in gguf.GGUFReader(default_model_path()).tensors
    }
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model.eval()


def _hf_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.weight"


def _dequantised(tensor: gguf.ReaderTensor) -> torch.Tensor:
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    heads = {"attn_q": 9, "attn_k": 3}.get(tensor.name.split(".")[-2])
    if heads:  # llama.cpp has interleaved the two halves of each head
        rows, columns = values.shape
        values = (
            values.reshape(heads, rows // heads // 2, 2, columns)
            .swapaxes(1, 2)
            .reshape(rows, columns)
        )
    return torch.from_numpy(np.ascontiguousarray(values))
