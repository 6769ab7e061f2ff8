"""GGUF architecture `llama`: Llama 1 to 3, Mistral, Mixtral, SmolLM2, others of the same shape.

llama.cpp rotates neighbouring pairs of a head, Hugging Face the two halves, so its converter has
interleaved the rows of q and k. Llama 3.1's frequency scaling comes as a tensor of divisors.
"""

from __future__ import annotations

from typing import Any

from tokenmill.checkpoint.gguf_architecture import GGUFArchitecture, Parameters
from tokenmill.checkpoint.gguf_decoder import (
    BLOCK_TENSORS,
    GLOBAL_TENSORS,
    decoder_config,
    require_full_rotation,
    rope_scaling,
)
from tokenmill.checkpoint.gguf_experts import expert_counts

_ROPE_FREQS = "rope_freqs.weight"


def build_config(parameters: Parameters) -> dict[str, Any]:
    """The config of a `LlamaForCausalLM`, or with experts of a `MixtralForCausalLM`.

    Beyond Hugging Face's keys there may be `rope_freq_factors`, float [head_dim / 2]: each rotary
    frequency is divided by its factor.
    """
    if parameters.integer("expert_count", 0, minimum=0):
        config = decoder_config(parameters, "MixtralForCausalLM", "mixtral", has_experts=True)
        config |= expert_counts(parameters, "num_local_experts")
    else:
        config = decoder_config(parameters, "LlamaForCausalLM", "llama")
    require_full_rotation(parameters, config["head_dim"])
    scaling = rope_scaling(parameters)
    if scaling:
        config["rope_scaling"] = scaling
    if _ROPE_FREQS in parameters.tensors:
        config["rope_freq_factors"] = parameters.float_vector(_ROPE_FREQS, config["head_dim"] // 2)
    return config


LLAMA = GGUFArchitecture(
    build_config=build_config,
    global_tensors=GLOBAL_TENSORS,
    block_tensors={**BLOCK_TENSORS, "ffn_gate_inp": "block_sparse_moe.gate"},
    expert_tensors={
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    permuted_heads={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
    consumed_tensors=frozenset({_ROPE_FREQS}),
)
