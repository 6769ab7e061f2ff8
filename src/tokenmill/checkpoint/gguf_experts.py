"""GGUF architectures `qwen3moe` and `gpt-oss`, and what files with experts have in common.

A layer's experts are three tensors, [experts, out_features, in_features], whose experts lie one
behind another in whole blocks; each is read as a matrix of its own.
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

_EXPERT_TENSORS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}


def expert_counts(parameters: Parameters, key: str) -> dict[str, Any]:
    """How many experts there are, as the config calls it, and how many a token uses.

    Raises `CheckpointError` for weights of experts that are scaled beyond their sum of 1.
    """
    if parameters.keys("expert_weights_scale"):
        scale = parameters.positive_float("expert_weights_scale")
        if scale != 1.0:
            parameters.fail("expert_weights_scale", f"is {scale}; only 1 is supported")
    return {
        key: parameters.integer("expert_count"),
        "num_experts_per_tok": parameters.integer("expert_used_count"),
    }


def qwen3moe_config(parameters: Parameters) -> dict[str, Any]:
    """The config of a `Qwen3MoeForCausalLM`, all of whose layers have experts."""
    config = decoder_config(parameters, "Qwen3MoeForCausalLM", "qwen3_moe", has_experts=True)
    require_full_rotation(parameters, config["head_dim"])
    scaling = rope_scaling(parameters)
    return {
        **config,
        **expert_counts(parameters, "num_experts"),
        "moe_intermediate_size": parameters.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        **({"rope_scaling": scaling} if scaling else {}),
    }


def gpt_oss_config(parameters: Parameters) -> dict[str, Any]:
    """The config of a `GptOssForCausalLM`.

    Beyond Hugging Face's keys it has `separate_experts`: gates and ups are not joined, and each
    expert's matrices have names of their own.
    """
    config = decoder_config(parameters, "GptOssForCausalLM", "gpt_oss", has_experts=True)
    require_full_rotation(parameters, config["head_dim"])
    scaling = rope_scaling(parameters)
    if scaling.get("rope_type") == "yarn":
        scaling["truncate"] = False  # of all gpt-oss; the file cannot say so
    return {
        **config,
        **expert_counts(parameters, "num_local_experts"),
        "intermediate_size": parameters.integer(
            "expert_feed_forward_length", config["intermediate_size"]
        ),
        "sliding_window": parameters.integer("attention.sliding_window"),
        "separate_experts": True,
        **({"rope_scaling": scaling} if scaling else {}),
    }


QWEN3MOE = GGUFArchitecture(
    qwen3moe_config,
    GLOBAL_TENSORS,
    {**BLOCK_TENSORS, "ffn_gate_inp": "mlp.gate"},
    expert_tensors=_EXPERT_TENSORS,
)
GPT_OSS = GGUFArchitecture(
    gpt_oss_config,
    GLOBAL_TENSORS,
    {
        **BLOCK_TENSORS,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    renamed_tensors={
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_exps.bias": "mlp.experts.gate_proj_bias",
        "ffn_up_exps.bias": "mlp.experts.up_proj_bias",
        "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    },
    expert_tensors=_EXPERT_TENSORS,
)
