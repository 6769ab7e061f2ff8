"""The model families that we serve, each with a small config: what the contract test runs over, and
what `docs/models.md` lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
"""Heads of 64 values, so that the native kernels serve them."""


@dataclass(frozen=True)
class Family:
    """One architecture, and how it is tested."""

    name: str
    models: str
    """What people call the models."""
    architecture: str
    """As `architectures` of a config.json names it."""
    config_class: str
    """Of transformers."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Beyond `COMMON`; None takes a key away."""
    is_recorded: bool = True
    """Whether a step's kernel calls are recorded, in bfloat16 on the native kernels."""
    runs_on_gpu: bool = True
    has_native_attention: bool = True
    has_attention: bool = True
    gguf: str = ""
    """`general.architecture` of GGUF files that are read."""
    real_weights: str = ""
    """The alias of a model whose real weights are tested."""
    not_supported: str = ""

    def settings(self) -> dict[str, Any]:
        """Arguments of the config class."""
        merged = COMMON | dict(self.config)
        return {key: value for key, value in merged.items() if value is not None}


_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.02 * i for i in range(24)],
    "long_factor": [1.0 + 0.3 * i for i in range(24)],
}

_LATENT = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 64,
    "initializer_range": 0.1,
}
"""Latent attention whose cache has 64 values a token."""

FAMILIES = [
    Family(
        "llama",
        "Llama 2 and 3, SmolLM2",
        "LlamaForCausalLM",
        "LlamaConfig",
        gguf="llama",
        real_weights="smollm2-135m",
    ),
    Family(
        "mistral",
        "Mistral 7B, Ministral",
        "MistralForCausalLM",
        "MistralConfig",
        {"sliding_window": 19, "head_dim": 64},
        gguf="llama",
    ),
    Family(
        "qwen2",
        "Qwen2, Qwen2.5",
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
        gguf="qwen2",
        not_supported="dual chunk attention",
    ),
    Family("qwen3", "Qwen3", "Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 64}, gguf="qwen3"),
    Family(
        "smollm3",
        "SmolLM3",
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 25,
        },
    ),
    Family(
        "phi3",
        "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        "Phi3ForCausalLM",
        "Phi3Config",
        {
            "rope_parameters": _LONG_ROPE,
            "original_max_position_embeddings": 8,
            "tie_word_embeddings": True,
        },
        gguf="phi3",
        not_supported="Phi-3-small, Phi-3.5-MoE, the vision models",
    ),
    Family("olmo2", "OLMo 2", "Olmo2ForCausalLM", "Olmo2Config", gguf="olmo2"),
    Family(
        "gpt2",
        "GPT-2, DistilGPT-2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "n_inner": 200,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    Family(
        "gemma2",
        "Gemma 2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            "head_dim": 64,
            "sliding_window": 23,
            "query_pre_attn_scalar": 50,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
        gguf="gemma2",
    ),
    Family(
        "gemma3",
        "Gemma 3 270M and 1B, and the text models of others",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "head_dim": 64,
            "num_hidden_layers": 3,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
                "full_attention": {
                    "rope_type": "linear",
                    "factor": 4.0,
                    "rope_theta": 50_000.0,
                },
            },
        },
        gguf="gemma3",
        real_weights="gemma3-270m",
        not_supported="images; bidirectional attention",
    ),
    Family(
        "mixtral",
        "Mixtral 8x7B and 8x22B",
        "MixtralForCausalLM",
        "MixtralConfig",
        {"num_local_experts": 5, "num_experts_per_tok": 2},
        gguf="llama",
    ),
    Family(
        "qwen3-moe",
        "Qwen3-30B-A3B and others with experts",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "head_dim": 64,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
        gguf="qwen3moe",
    ),
    Family(
        "gpt-oss",
        "gpt-oss-20b and -120b",
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            "head_dim": 64,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 22,
            "swiglu_limit": 1.0,
            "initializer_range": 0.1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
        gguf="gpt-oss",
    ),
    Family(
        "deepseek-v2",
        "DeepSeek V2, V2-Lite",
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        _LATENT
        | {
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        },
        not_supported="weights in float8",
    ),
    Family(
        "deepseek-v3",
        "DeepSeek V3, R1",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        _LATENT
        | {
            "q_lora_rank": 40,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 128,
            },
        },
        not_supported="weights in float8, prediction of several tokens",
    ),
    Family(
        "bamba",
        "Bamba 9B",
        "BambaForCausalLM",
        "BambaConfig",
        {
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "time_step_limit": [0.0, 1.5],
        },
    ),
    Family(
        "mamba2",
        "Mamba-2, Mamba-Codestral",
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "intermediate_size": None,
            "num_attention_heads": None,
            "num_key_value_heads": None,
            "max_position_embeddings": None,
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 32,
            "n_groups": 2,
            "state_size": 16,
            "chunk_size": 32,
            "time_step_limit": [0.0, 1.5],
        },
        has_attention=False,
        not_supported="Mamba (the first)",
    ),
]
"""In the order of the page."""
