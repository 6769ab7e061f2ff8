"""GGUF files of models with experts, written as llama.cpp's converter does, in many block types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.blocks import random_blocks
from helpers.families import FAMILIES, Family
from helpers.family_models import prompt, random_model
from helpers.models import PagedRun, model_config
from helpers.ranks import together
from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.checkpoint import Checkpoint
from tokenmill.checkpoint.gguf_checkpoint import GGUFCheckpoint
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import CheckpointError
from tokenmill.kernels import native
from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.packed import NativeKernels
from tokenmill.layers.plain import PlainKernels
from tokenmill.models.loader import load_model
from tokenmill.parallel.group import SharedMemoryGroup

Tensors = dict[str, torch.Tensor]

NAMES = ["mixtral", "qwen3-moe", "gpt-oss"]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
"""So that rows hold super-blocks of 256 values."""
BLOCK_TYPES = ["F32", "Q8_0", "Q4_0", "Q5_1", "IQ4_NL", "MXFP4", "Q4_K", "Q5_K", "Q6_K", "Q2_K"]
MIXED = "Q4_K Q6_K Q8_0"
PARTS = {"mixtral": ("w1", "w3", "w2"), "qwen3-moe": ("gate_proj", "up_proj", "down_proj")}


def family_of(name: str) -> Family:
    (family,) = (each for each in FAMILIES if each.name == name)
    changes: dict[str, Any] = dict(WIDE)
    if name == "gpt-oss":
        rope = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 8.0}
        changes["rope_parameters"] = {
            **rope,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        }
        changes["swiglu_limit"] = 7.0
    settings = {**family.config, **changes}
    if name == "mixtral":
        del settings["moe_intermediate_size"]
    if name == "qwen3-moe":
        settings["mlp_only_layers"] = []
    return Family(
        name, family.models, family.architecture, family.config_class, settings, gguf=family.gguf
    )


def apart(name: str, tensors: Tensors, layer: int) -> list[torch.Tensor]:
    """A layer's gates, ups and downs, [experts, out_features, in_features] each."""
    prefix = f"model.layers.{layer}.mlp.experts"
    if name == "gpt-oss":
        gate_up = tensors[f"{prefix}.gate_up_proj"].transpose(1, 2)
        down = tensors[f"{prefix}.down_proj"].transpose(1, 2)
        return [gate_up[:, 0::2], gate_up[:, 1::2], down]
    if name == "mixtral":
        prefix = f"model.layers.{layer}.block_sparse_moe.experts"
    found = []
    for part in PARTS[name]:
        matrices = []
        while (matrix := f"{prefix}.{len(matrices)}.{part}.weight") in tensors:
            matrices.append(tensors[matrix])
        found.append(torch.stack(matrices))
    return found


def put(name: str, tensors: Tensors, layer: int, parts: list[torch.Tensor]) -> None:
    """The inverse of `apart`."""
    prefix = f"model.layers.{layer}.mlp.experts"
    if name == "gpt-oss":
        gate_up = torch.stack(parts[:2], dim=2).flatten(1, 2)
        tensors[f"{prefix}.gate_up_proj"] = gate_up.transpose(1, 2).contiguous()
        tensors[f"{prefix}.down_proj"] = parts[2].transpose(1, 2).contiguous()
        return
    if name == "mixtral":
        prefix = f"model.layers.{layer}.block_sparse_moe.experts"
    for part, values in zip(PARTS[name], parts, strict=True):
        for expert, matrix in enumerate(values):
            tensors[f"{prefix}.{expert}.{part}.weight"] = matrix.contiguous()


def in_blocks(block_type: str, values: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """Raw data of [experts, n, k] and what it stands for; random codes of a type that the gguf
    library cannot write, scaled to what `values` are.
    """
    kind = gguf.GGMLQuantizationType[block_type]
    shape = tuple(values.shape)
    if block_type in ("F32", "Q8_0", "Q4_0", "Q5_1"):
        raw = gguf.quants.quantize(values.numpy(), kind)
        return raw, torch.from_numpy(np.asarray(gguf.quants.dequantize(raw, kind)))
    raw_bytes, weight = random_blocks(block_type, shape[0] * shape[1], shape[2])
    return raw_bytes.numpy().reshape(*shape[:2], -1), weight.view(shape)


def add_experts(
    writer: gguf.GGUFWriter, block_type: str, name: str, tensors: Tensors, layer: int
) -> None:
    """Write a layer's experts in blocks, and leave what these stand for in `tensors`.

    `block_type` may be three, of gates, ups and downs.
    """
    found = []
    types = block_type.split(" ") if " " in block_type else [block_type] * 3
    parts = zip(("gate", "up", "down"), types, apart(name, tensors, layer), strict=True)
    for part, type_of_part, values in parts:
        raw, weight = in_blocks(type_of_part, values.contiguous())
        kind = gguf.GGMLQuantizationType[type_of_part]
        writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", raw, raw_dtype=kind)
        found.append(weight)
    put(name, tensors, layer, found)


def add_metadata(writer: gguf.GGUFWriter, name: str, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_size = getattr(config, "head_dim", None) or 128
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if name == "qwen3-moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if name == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(
            config.rope_parameters["original_max_position_embeddings"]
        )


def interleaved(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q or k as the converter of the llama family leaves them."""
    halves = values.view(num_heads, 2, -1, values.shape[-1])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write(
    directory: Path,
    name: str,
    block_type: str,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> tuple[Path, Path]:
    """A GGUF file, and a directory with the same values in safetensors."""
    family = family_of(name)
    model = random_model(family)
    plain, file = directory / "plain", directory / "model.gguf"
    model.save_pretrained(plain)
    tensors, config = load_file(plain / "model.safetensors"), model.config
    architecture = family.gguf
    writer = gguf.GGUFWriter(file, architecture)
    add_metadata(writer, name, config)
    change(writer)
    enum = {"llama": "LLAMA", "qwen3moe": "QWEN3MOE", "gpt-oss": "GPT_OSS"}[architecture]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[enum], config.num_hidden_layers)
    for layer in range(config.num_hidden_layers):
        add_experts(writer, block_type, name, tensors, layer)
        biases = tensors.get(f"model.layers.{layer}.mlp.experts.gate_up_proj_bias")
        if biases is not None:
            down = tensors[f"model.layers.{layer}.mlp.experts.down_proj_bias"]
            parts = {"gate": biases[:, 0::2], "up": biases[:, 1::2], "down": down}
            for part, values in parts.items():
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.bias", values.contiguous().numpy())
    for tensor_name, tensor in tensors.items():
        if ".experts." in tensor_name:
            continue
        if name == "mixtral" and ".q_proj." in tensor_name:
            tensor = interleaved(tensor, config.num_attention_heads)
        if name == "mixtral" and ".k_proj." in tensor_name:
            tensor = interleaved(tensor, config.num_key_value_heads)
        found = names.get_name(tensor_name, try_suffixes=(".weight", ".bias"))
        if tensor_name.endswith("self_attn.sinks"):
            found = f"blk.{tensor_name.split('.')[2]}.attn_sinks.weight"
        assert found is not None, tensor_name
        writer.add_tensor(found, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return file, plain


@torch.inference_mode()
def logits(checkpoint: Checkpoint, kernels: LayerKernels | None) -> torch.Tensor:
    model = load_model(model_config(checkpoint.config), checkpoint, kernels=kernels)
    return model.compute_logits(PagedRun(model, "float32").prefill("a", prompt(70, 4)))


EVERY_PAIR = [
    # Every type, and every family in types of each kind.
    pytest.param(name, block_type, marks=pytest.mark.slow)
    if name != "mixtral" and block_type not in ("Q8_0", "MXFP4", MIXED)
    else (name, block_type)
    for name in NAMES
    for block_type in [*BLOCK_TYPES, MIXED]
]


@pytest.mark.parametrize(("name", "block_type"), EVERY_PAIR)
def test_experts_in_blocks_are_those_of_the_expanded_model(
    name: str, block_type: str, tmp_path: Path
) -> None:
    """In float32 to the bit; test_contract.py compares the expanded form with transformers."""
    file, plain = write(tmp_path, name, block_type)
    found = GGUFCheckpoint.open(file)
    expected = open_checkpoint(plain)
    for kernels in (PlainKernels(), None):
        assert torch.equal(logits(found, kernels), logits(expected, kernels))


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    file, plain = write(tmp_path, name, "Q8_0")
    theirs = AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager").eval()
    expected = theirs(torch.tensor([prompt(70, 4)])).logits[0]
    for kernels in (PlainKernels(), None):
        found = logits(GGUFCheckpoint.open(file), kernels)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@pytest.mark.skipif(not native.is_available(), reason="needs the native kernels")
@torch.inference_mode()
def test_experts_with_biases_are_divided_among_ranks(tmp_path: Path) -> None:
    file, _ = write(tmp_path, "gpt-oss", "Q8_0")
    expected = logits(GGUFCheckpoint.open(file), None)

    @torch.inference_mode()
    def compute(group: SharedMemoryGroup) -> torch.Tensor:
        return logits(GGUFCheckpoint.open(file), NativeKernels(group=group))

    for found in together(2, compute):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def generated(path: Path, prompts: list[list[int]], **settings: Any) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    defaults: dict[str, Any] = {"num_kv_blocks": 16, "max_model_len": 128, "device": "cpu"}
    with LLM(str(path), skip_tokenizer_init=True, **(defaults | settings)) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
    return [
        (
            output.outputs[0].token_ids,
            [next(iter(step.values())).logprob for step in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


@pytest.mark.parametrize("block_type", ["MXFP4", "Q4_K", "Q8_0", MIXED])
@pytest.mark.parametrize("name", NAMES)
def test_codes_serve_bfloat16(name: str, block_type: str, tmp_path: Path) -> None:
    """The kernels keep them; recorded, and the same bits alone, in a batch and in pieces."""
    file, plain = write(tmp_path, name, block_type)
    prompts = [prompt(40, 1), prompt(3, 2), prompt(21, 3)]
    together = generated(file, prompts, check_graphs=True)
    assert [generated(file, [ids])[0] for ids in prompts] == together
    assert generated(file, prompts, max_num_batched_tokens=16) == together
    if block_type == "Q8_0":  # random codes make models whose logits are far apart
        expanded = generated(plain, prompts)
        for (_, found), (_, wanted) in zip(together, expanded, strict=True):
            assert abs(found[0] - wanted[0]) < 0.3


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("mixtral", "llama.expert_weights_scale", 2.5, "only 1 is supported"),
        ("mixtral", "llama.expert_count", "8", "must be a whole number"),
        ("gpt-oss", "gpt-oss.rope.dimension_count", 32, "must equal the size of a head"),
        ("qwen3-moe", "qwen3moe.expert_feed_forward_length", 0, "must be a whole number"),
    ],
)
def test_a_file_that_asks_for_more_is_refused(
    name: str, key: str, value: float | str, message: str, tmp_path: Path
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        kinds = {str: "STRING", float: "FLOAT32", int: "UINT32"}
        writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])

    file, _ = write(tmp_path, name, "F32", change)
    with pytest.raises(CheckpointError, match=message):
        GGUFCheckpoint.open(file)


def test_fewer_experts_than_the_config_says_are_missed(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("llama.expert_count")
        writer.add_uint32("llama.expert_count", 6)

    file, _ = write(tmp_path, "mixtral", "F32", change)
    with pytest.raises(CheckpointError, match=r"6 missing: .*experts\.5\.w1"):
        logits(GGUFCheckpoint.open(file), PlainKernels())


def test_a_number_of_experts_that_no_model_has_is_refused(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        many = np.zeros(((1 << 20) + 1, 1, 1), dtype=np.float32)
        writer.add_tensor("blk.9.ffn_up_exps.weight", many)

    file, _ = write(tmp_path, "mixtral", "F32", change)
    with pytest.raises(CheckpointError, match="matrices of experts, and the limit is 1048576"):
        GGUFCheckpoint.open(file)
