"""Families that run on transformers' own code, each with a small config: what the tests of that
backend run over, and what `docs/models.md` lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from helpers.families import COMMON


@dataclass(frozen=True)
class LibraryFamily:
    """One architecture, and how it is tested."""

    name: str
    models: str
    """What people call the models."""
    architecture: str
    """As `architectures` of a config.json names it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Beyond `COMMON`; None takes a key away."""
    tests: str = ""
    """What is special about it."""
    is_native: bool = False
    """Whether it is one of `helpers.families`, too, and has to be asked for."""

    def settings(self) -> dict[str, Any]:
        """Arguments of the config class."""
        merged = COMMON | dict(self.config)
        return {key: value for key, value in merged.items() if value is not None}


_HYBRID = {
    "num_hidden_layers": 3,
    "sliding_window": 23,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

LIBRARY_FAMILIES = [
    LibraryFamily(
        "stablelm",
        "StableLM 2",
        "StableLmForCausalLM",
        {"use_qkv_bias": True, "qk_layernorm": True},
        "RoPE of a part of a head, LayerNorm of heads",
    ),
    LibraryFamily(
        "cohere",
        "Command R",
        "CohereForCausalLM",
        {"use_qk_norm": True, "logit_scale": 0.5},
        "attention and MLP side by side, scaled logits, tied head",
    ),
    LibraryFamily(
        "cohere2",
        "Command R7B, Aya",
        "Cohere2ForCausalLM",
        _HYBRID,
        "windows, layers without RoPE",
    ),
    LibraryFamily(
        "granite",
        "Granite 3",
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.05,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
        "four multipliers",
    ),
    LibraryFamily(
        "granitemoe",
        "Granite 3 MoE",
        "GraniteMoeForCausalLM",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "attention_multiplier": 0.1},
        "experts in two tensors a layer",
    ),
    LibraryFamily(
        "olmoe",
        "OLMoE",
        "OlmoeForCausalLM",
        {"num_experts": 8, "num_experts_per_tok": 3},
        "experts in three tensors each, norms over all heads",
    ),
    LibraryFamily(
        "gpt-neox",
        "Pythia, GPT-NeoX",
        "GPTNeoXForCausalLM",
        {"num_key_value_heads": None},
        "q, k and v in one matrix by heads, biases, another name for the head",
    ),
    LibraryFamily(
        "starcoder2",
        "StarCoder2",
        "Starcoder2ForCausalLM",
        {"sliding_window": 21},
        "LayerNorm, a window in every layer",
    ),
    LibraryFamily(
        "nemotron",
        "Nemotron-4, Minitron",
        "NemotronForCausalLM",
        {"partial_rotary_factor": 0.5},
        "squared ReLU, LayerNorm with 1 + weight",
    ),
    LibraryFamily("phi", "Phi-1, Phi-1.5, Phi-2", "PhiForCausalLM", {}, "a head with a bias"),
    LibraryFamily(
        "glm4",
        "GLM-4",
        "Glm4ForCausalLM",
        {"head_dim": 64},
        "gates and ups in one matrix, norms behind blocks",
    ),
    LibraryFamily("helium", "Helium", "HeliumForCausalLM", {"head_dim": 64}, "interleaved RoPE"),
    LibraryFamily(
        "ernie4.5", "ERNIE 4.5", "Ernie4_5ForCausalLM", {"head_dim": 64}, "interleaved RoPE"
    ),
    LibraryFamily(
        "exaone4", "EXAONE 4", "Exaone4ForCausalLM", _HYBRID, "windows, norms behind blocks"
    ),
    LibraryFamily("arcee", "AFM 4.5B", "ArceeForCausalLM", {}, "squared ReLU"),
    LibraryFamily(
        "opt",
        "OPT",
        "OPTForCausalLM",
        {"num_key_value_heads": None, "ffn_dim": 200, "word_embed_proj_dim": 128},
        "learned positions with an offset",
    ),
    LibraryFamily("llama", "", "LlamaForCausalLM", {}, "", is_native=True),
    LibraryFamily(
        "gpt-oss",
        "",
        "GptOssForCausalLM",
        {
            "head_dim": 64,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 22,
            "initializer_range": 0.1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0},
        },
        "sinks",
        is_native=True,
    ),
    LibraryFamily(
        "deepseek-v3",
        "",
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 2,
            "q_lora_rank": 40,
            "kv_lora_rank": 48,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 24,
            "v_head_dim": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "initializer_range": 0.1,
        },
        "values of another size than keys",
        is_native=True,
    ),
]
"""In the order of the page."""
