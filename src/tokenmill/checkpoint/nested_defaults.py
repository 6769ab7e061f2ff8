"""What files of models with a vision tower leave out: defaults of the library that wrote them."""

from __future__ import annotations

from typing import Any

from tokenmill.checkpoint.expert_layout import EXPERT_LAYOUT, FUSED_TRANSPOSED

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
}
_QWEN2 = _LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
}
_QWEN2_VL = _QWEN2 | {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "eos_token_id": 151645,
}
_QWEN3_VL = _QWEN2 | {
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rope_theta": 500_000.0,
}
_QWEN3_VL_MOE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
    "eos_token_id": None,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    EXPERT_LAYOUT: FUSED_TRANSPOSED,
}
TEXT_DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "mistral": (
        "MistralForCausalLM",
        _LLAMA
        | {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "qwen2": ("Qwen2ForCausalLM", _QWEN2),
    "qwen3": ("Qwen3ForCausalLM", _QWEN2 | {"num_attention_heads": 32, "head_dim": 128}),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_text"), ("Qwen3ForCausalLM", _QWEN3_VL)),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text"), ("Qwen3MoeForCausalLM", _QWEN3_VL_MOE)),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "eos_token_id": 1,
        },
    ),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
        ("Qwen2ForCausalLM", _QWEN2_VL),
    ),
}
"""`model_type` of a `text_config` -> the decoder's own architecture, and what a file leaves out."""

_CLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_SIGLIP = _CLIP | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_IDEFICS3 = _SIGLIP | {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_QWEN2_TOWER = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN2_5_TOWER = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN3_TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_INTERNVL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "norm_type": "layer_norm",
    "use_mean_pooling": True,
}
_PIXTRAL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
}
VISION_DEFAULTS: dict[str, dict[str, Any]] = {
    "clip_vision_model": _CLIP,
    "siglip_vision_model": _SIGLIP,
    "idefics3": _IDEFICS3,
    "idefics3_vision": _IDEFICS3,
    "smolvlm_vision": _IDEFICS3,
    "pixtral": _PIXTRAL,
    "internvl_vision": _INTERNVL,
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_vision"), _QWEN2_TOWER),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_vision"), _QWEN2_5_TOWER),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_vision"), _QWEN3_TOWER),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_vision"), _QWEN3_TOWER),
}
"""`model_type` of a `vision_config` -> what a file leaves out."""

DEFAULT_KINDS = {
    "Gemma3ForConditionalGeneration": ("gemma3_text", "siglip_vision_model"),
    "LlavaForConditionalGeneration": ("llama", "clip_vision_model"),
    "LlavaNextForConditionalGeneration": ("llama", "clip_vision_model"),
    "LlavaOnevisionForConditionalGeneration": ("qwen2", "siglip_vision_model"),
    "Idefics3ForConditionalGeneration": ("llama", "idefics3_vision"),
    "SmolVLMForConditionalGeneration": ("llama", "smolvlm_vision"),
    "Mistral3ForConditionalGeneration": ("mistral", "pixtral"),
    "InternVLForConditionalGeneration": ("qwen2", "internvl_vision"),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_text", "qwen2_vl_vision"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl_text", "qwen2_5_vl_vision"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_text", "qwen3_vl_vision"),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe_text", "qwen3_vl_moe_vision"),
}
"""`model_type` of both parts, where they do not say."""

_LLAVA_TOWER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
"""What the family has instead of CLIP's defaults, where there is no `vision_config`."""
_ONEVISION_TOWER = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}
TOWERS_LEFT_OUT: dict[str, dict[str, Any]] = {
    "LlavaForConditionalGeneration": _LLAVA_TOWER,
    "LlavaNextForConditionalGeneration": _LLAVA_TOWER,
    "LlavaOnevisionForConditionalGeneration": _ONEVISION_TOWER,
}
TOP_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlavaNextForConditionalGeneration": {
        "image_token_index": 32000,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    },
    "LlavaOnevisionForConditionalGeneration": {
        "image_token_index": 151646,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_9",
        "image_grid_pinpoints": [
            [384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)
        ],
    },
}
"""What files leave out beside both parts."""
