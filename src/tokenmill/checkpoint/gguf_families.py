"""GGUF architectures `qwen2`, `qwen3`, `phi3`, `olmo2`, `gemma2` and `gemma3`.

llama.cpp rotates the halves of their heads, as Hugging Face does, so rows are in order. To Gemma's
norms its converter has added the 1 that the model adds.
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

_LONG_FACTORS = "rope_factors_long.weight"
_SHORT_FACTORS = "rope_factors_short.weight"
_PHI3_SCALING = {"rope.scaling.original_context_length", "rope.scaling.attn_factor"}
_GEMMA3_PERIOD = 6
_LAYERS_OF_GEMMA3_27B = 62
_LAYERS_OF_GEMMA2_27B = 46


def _plain_config(parameters: Parameters, architecture: str, model_type: str) -> dict[str, Any]:
    config = decoder_config(parameters, architecture, model_type)
    require_full_rotation(parameters, config["head_dim"])
    scaling = rope_scaling(parameters)
    return config | ({"rope_scaling": scaling} if scaling else {})


def qwen2_config(parameters: Parameters) -> dict[str, Any]:
    """The config of a `Qwen2ForCausalLM`."""
    return _plain_config(parameters, "Qwen2ForCausalLM", "qwen2")


def qwen3_config(parameters: Parameters) -> dict[str, Any]:
    """The config of a `Qwen3ForCausalLM`."""
    return _plain_config(parameters, "Qwen3ForCausalLM", "qwen3")


def olmo2_config(parameters: Parameters) -> dict[str, Any]:
    """The config of an `Olmo2ForCausalLM`."""
    return _plain_config(parameters, "Olmo2ForCausalLM", "olmo2")


def phi3_config(parameters: Parameters) -> dict[str, Any]:
    """The config of a `Phi3ForCausalLM`."""
    config = decoder_config(parameters, "Phi3ForCausalLM", "phi3")
    rotated = parameters.integer("rope.dimension_count", config["head_dim"])
    if rotated > config["head_dim"]:
        parameters.fail("rope.dimension_count", f"is {rotated}, more than {config['head_dim']}")
    config["partial_rotary_factor"] = rotated / config["head_dim"]
    window = parameters.integer("attention.sliding_window", 0, minimum=0)
    if window:
        config["sliding_window"] = window
    unknown = parameters.keys("rope.scaling.") - _PHI3_SCALING
    if unknown:
        parameters.fail(min(unknown), "is set; this kind of rope scaling is not supported")
    if _LONG_FACTORS in parameters.tensors and _SHORT_FACTORS in parameters.tensors:
        config["original_max_position_embeddings"] = parameters.integer(
            "rope.scaling.original_context_length"
        )
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": parameters.float_vector(_LONG_FACTORS, rotated // 2),
            "short_factor": parameters.float_vector(_SHORT_FACTORS, rotated // 2),
            "attention_factor": parameters.positive_float("rope.scaling.attn_factor", 1.0),
        }
    return config


def _gemma_config(
    parameters: Parameters, architecture: str, model_type: str, layers_of_27b: int
) -> dict[str, Any]:
    config = _plain_config(parameters, architecture, model_type)
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    # The file does not say how queries are scaled; only the models of 27B differ.
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if num_layers == layers_of_27b else head_dim,
        "sliding_window": parameters.integer("attention.sliding_window"),
    }
    del config["hidden_act"]
    for key, hf_key in (
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ):
        config[hf_key] = parameters.positive_float(key) if parameters.keys(key) else None
    return config


def gemma2_config(parameters: Parameters) -> dict[str, Any]:
    """The config of a `Gemma2ForCausalLM`."""
    return _gemma_config(parameters, "Gemma2ForCausalLM", "gemma2", _LAYERS_OF_GEMMA2_27B)


def gemma3_config(parameters: Parameters) -> dict[str, Any]:
    """The config of a `Gemma3ForCausalLM`."""
    config = _gemma_config(parameters, "Gemma3ForCausalLM", "gemma3_text", _LAYERS_OF_GEMMA3_27B)
    theta = config.pop("rope_theta")
    scaling = config.pop("rope_scaling", {"rope_type": "default"})
    local_theta = parameters.positive_float("rope.freq_base_swa", 10_000.0)
    return config | {
        "sliding_window_pattern": _GEMMA3_PERIOD,
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    }


_SANDWICH_TENSORS = {
    **BLOCK_TENSORS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

QWEN2 = GGUFArchitecture(qwen2_config, GLOBAL_TENSORS, BLOCK_TENSORS)
QWEN3 = GGUFArchitecture(qwen3_config, GLOBAL_TENSORS, BLOCK_TENSORS)
PHI3 = GGUFArchitecture(
    phi3_config,
    GLOBAL_TENSORS,
    {**BLOCK_TENSORS, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    consumed_tensors=frozenset({_LONG_FACTORS, _SHORT_FACTORS}),
)
OLMO2 = GGUFArchitecture(
    olmo2_config,
    GLOBAL_TENSORS,
    {
        **BLOCK_TENSORS,
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
GEMMA2 = GGUFArchitecture(gemma2_config, GLOBAL_TENSORS, _SANDWICH_TENSORS, norm_offset=1.0)
GEMMA3 = GGUFArchitecture(gemma3_config, GLOBAL_TENSORS, _SANDWICH_TENSORS, norm_offset=1.0)
