"""GGUF files of each family, written as llama.cpp's converter does, give transformers' logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from helpers.families import COMMON, FAMILIES
from helpers.models import PagedRun, model_config
from tokenmill.checkpoint.gguf_checkpoint import GGUFCheckpoint
from tokenmill.errors import CheckpointError
from tokenmill.layers.plain import PlainKernels
from tokenmill.models.loader import load_model

DIFFERENT: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": False, "sliding_window": None},
    "phi3": {"sliding_window": 30},
    "gemma2": {"query_pre_attn_scalar": 64},
    "gemma3": {
        "num_hidden_layers": 7,
        "layer_types": None,
        "query_pre_attn_scalar": 64,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
        },
    },
}
"""What a file cannot say is as llama.cpp takes it for granted."""

ARCHITECTURES = [
    family.gguf
    for family in FAMILIES
    if family.gguf == family.name and family.name not in ("llama", "gpt-oss")
]
"""Those of helpers/gguf.py and of test_gguf_experts.py left out."""


def reference(name: str) -> Any:
    """transformers' model with random weights everywhere, biases and norms included."""
    (family,) = (each for each in FAMILIES if each.name == name)
    settings = family.settings() | DIFFERENT.get(name, {})
    settings = {key: value for key, value in settings.items() if value is not None}
    config = getattr(transformers, family.config_class)(**settings, attn_implementation="eager")
    torch.manual_seed(3)
    model = getattr(transformers, family.architecture)(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 or parameter_name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def write_gguf(
    path: Path, name: str, model: Any, add: Callable[[gguf.GGUFWriter], None] = lambda writer: None
) -> Path:
    """All tensors in float32, Gemma's norms with the 1 that they are applied with."""
    config = model.config
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_tokenizer_model("gpt2")
    _add_rope(writer, name, config.rope_parameters)
    if name == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if name in ("phi3", "gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    add(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], config.num_hidden_layers)
    for tensor_name, tensor in model.state_dict().items():
        if tensor_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.startswith("gemma") and tensor_name.endswith("norm.weight"):
            tensor = tensor + 1
        writer.add_tensor(
            names.get_name(tensor_name, try_suffixes=(".weight", ".bias")), tensor.numpy()
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rope(writer: gguf.GGUFWriter, name: str, rope: dict[str, Any]) -> None:
    if name == "gemma3":
        rope = rope["full_attention"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if name == "phi3":
        writer.add_rope_dimension_count(48)
        for kind in ("long", "short"):
            factors = torch.tensor(rope[f"{kind}_factor"], dtype=torch.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors.numpy())
        # transformers computes it: sqrt(1 + log(512 / 8) / log(8))
        writer.add_rope_scaling_attn_factors(3**0.5)


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = reference(name)
    checkpoint = GGUFCheckpoint.open(write_gguf(tmp_path / "model.gguf", name, theirs))
    model = load_model(model_config(checkpoint.config), checkpoint, kernels=PlainKernels())
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(COMMON["vocab_size"], (90,), generator=generator).tolist()
    found = model.compute_logits(PagedRun(model, "float32").prefill("a", ids))
    expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("qwen2", "qwen2.expert_count", 8, "experts of this architecture are not supported"),
        ("qwen2", "qwen2.rope.dimension_count", 32, "must equal the size of a head, 64"),
        ("phi3", "phi3.rope.scaling.factor", 3, "this kind of rope scaling is not supported"),
        ("gemma2", "gemma2.attention.value_length", 32, "must equal the size of a head, 64"),
    ],
)
def test_a_file_that_asks_for_more_is_refused(
    name: str, key: str, value: int, message: str, tmp_path: Path
) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_uint32(key, value)

    path = write_gguf(tmp_path / "model.gguf", name, reference(name), add)
    with pytest.raises(CheckpointError, match=message):
        GGUFCheckpoint.open(path)
