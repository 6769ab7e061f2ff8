"""Gemma 3 270M in transformers, built from the dequantised weights with none of our code."""

from __future__ import annotations

import functools
from typing import Any

import gguf
import numpy as np
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tokenmill.checkpoint.names import resolve_model

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@functools.cache
def gemma_reference() -> Any:
    """float32. transformers multiplies with 1 + weight; the file has the sum."""
    config = Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32_768,
        sliding_window=512,
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-6,
        attn_implementation="eager",
    )
    model = Gemma3ForCausalLM(config).eval()
    state = {}
    for tensor in gguf.GGUFReader(resolve_model("gemma3-270m")).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        offset = 1.0 if tensor.name.endswith("norm.weight") else 0.0
        state[_hf_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(values)) - offset
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def _hf_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.weight"
