"""What the GGUF files of most decoders have in common: sizes, RoPE scaling, names of tensors."""

from __future__ import annotations

import math
from typing import Any

from tokenmill.checkpoint.gguf_architecture import Parameters

GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_SCALING_KEYS = {
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}


def decoder_config(
    parameters: Parameters, architecture: str, model_type: str, *, has_experts: bool = False
) -> dict[str, Any]:
    """The config.json of a decoder with RMSNorm and RoPE, but for what its family has of its own.

    `architecture` and `model_type` are Hugging Face's names. Raises `CheckpointError` for experts
    where none are expected.
    """
    if not has_experts and parameters.integer("expert_count", 0, minimum=0):
        parameters.fail("expert_count", "is set; experts of this architecture are not supported")
    hidden_size = parameters.integer("embedding_length")
    vocab_size = _vocab_size(parameters, hidden_size)
    num_heads = parameters.integer("attention.head_count")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "num_hidden_layers": _num_layers(parameters),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_kv_heads(parameters, num_heads),
        "head_dim": head_dim(parameters, hidden_size, num_heads),
        "intermediate_size": parameters.integer(
            "expert_feed_forward_length"
            if has_experts and not parameters.keys("feed_forward_length")
            else "feed_forward_length"
        ),
        "max_position_embeddings": parameters.integer("context_length"),
        "rms_norm_eps": parameters.positive_float("attention.layer_norm_rms_epsilon"),
        "rope_theta": parameters.positive_float("rope.freq_base", 10000.0),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in parameters.tensors,
        "attention_bias": "blk.0.attn_q.bias" in parameters.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in parameters.tensors,
    }


def _num_layers(parameters: Parameters) -> int:
    num_layers = parameters.integer("block_count")
    if num_layers > len(parameters.tensors):
        parameters.fail(
            "block_count", f"is {num_layers}, but the file has {len(parameters.tensors)} tensors"
        )
    return num_layers


def _num_kv_heads(parameters: Parameters, num_heads: int) -> int:
    num_kv_heads = parameters.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        parameters.fail(
            "attention.head_count_kv",
            f"is {num_kv_heads}, which does not divide the {num_heads} attention heads",
        )
    return num_kv_heads


def head_dim(parameters: Parameters, hidden_size: int, num_heads: int) -> int:
    """Values per head; queries, keys and values must agree on it."""
    size = parameters.integer("attention.key_length", max(1, hidden_size // num_heads))
    value_size = parameters.integer("attention.value_length", size)
    if value_size != size:
        parameters.fail(
            "attention.value_length", f"is {value_size}; it must equal the size of a head, {size}"
        )
    return size


def require_full_rotation(parameters: Parameters, size: int) -> None:
    """Raise `CheckpointError` for heads of `size` values that are rotated in part."""
    rotated = parameters.integer("rope.dimension_count", size)
    if rotated != size:
        parameters.fail(
            "rope.dimension_count", f"is {rotated}; it must equal the size of a head, {size}"
        )


def _vocab_size(parameters: Parameters, hidden_size: int) -> int:
    embedding = parameters.tensors.get("token_embd.weight")
    if embedding is None:
        parameters.fail("embedding_length", "is set, but tensor 'token_embd.weight' is missing")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
        parameters.fail(
            "embedding_length",
            f"is {hidden_size}, but tensor 'token_embd.weight' has the shape {embedding.shape}",
        )
    return embedding.shape[0]


def rope_scaling(parameters: Parameters) -> dict[str, Any]:
    """The config's `rope_scaling`; empty if there is none."""
    unknown = parameters.keys("rope.scaling.") - _SCALING_KEYS
    if unknown:
        parameters.fail(min(unknown), "is set; this kind of rope scaling is not supported")
    kind = parameters.text("rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        parameters.fail("rope.scaling.type", f"is {kind!r:.80}; it must be none, linear or yarn")
    factor = parameters.positive_float("rope.scaling.factor")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling.update(_yarn(parameters, factor))
    return scaling


def _yarn(parameters: Parameters, factor: float) -> dict[str, Any]:
    present = parameters.keys("rope.scaling.")
    yarn: dict[str, Any] = {}
    if "rope.scaling.original_context_length" in present:
        yarn["original_max_position_embeddings"] = parameters.integer(
            "rope.scaling.original_context_length"
        )
    for name in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{name}" in present:
            yarn[name] = parameters.positive_float(f"rope.scaling.yarn_{name}")
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        if key in present:
            # llama.cpp multiplies this into YaRN's own factor; Hugging Face gives the product.
            own_factor = 0.1 * math.log(factor) + 1.0
            yarn["attention_factor"] = parameters.positive_float(key) * own_factor
    return yarn
