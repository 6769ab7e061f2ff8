"""Random weights: their shapes, values, and what they cost."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch

from helpers.models import TensorCheckpoint, model_config
from tokenmill.checkpoint import dummy
from tokenmill.checkpoint.dummy import DummyCheckpoint, open_dummy
from tokenmill.errors import CheckpointError, ConfigError, ModelNotFoundError
from tokenmill.layers.plain import PlainKernels
from tokenmill.models.loader import load_model, tensor_shapes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_bias": True,
}
NORM = "model.layers.0.input_layernorm.weight"
UP, GATE = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("up", "gate"))
HEAD = "lm_head.weight"


def checkpoint(seed: int = 0, **config) -> DummyCheckpoint:
    config = CONFIG | config
    return DummyCheckpoint(
        Path("nowhere"),
        config=config,
        generation_config={},
        tokenizer_data=None,
        tensor_shapes=tensor_shapes(config),
        seed=seed,
    )


def values(source: DummyCheckpoint, name: str) -> torch.Tensor:
    raw = source.read(name)
    assert raw.format == source.tensor_formats[name] == "BF16"
    assert raw.data.dtype == torch.uint8
    assert raw.data.is_contiguous()
    return raw.data.view(torch.bfloat16).view(source.tensor_shapes[name])


def test_the_tensors_are_those_that_the_model_reads():
    source = checkpoint()
    assert source.tensor_shapes[UP] == (96, 64)
    assert source.tensor_shapes["model.layers.0.self_attn.k_proj.bias"] == (32,)
    assert len(source.tensor_shapes) == 2 * 13 + 3  # each layer's; embedding, norm and head
    assert source.num_bytes == 2 * sum(map(prod, source.tensor_shapes.values()))
    model = load_model(model_config(CONFIG), source, kernels=PlainKernels())
    assert torch.equal(
        model.model.layers["1"].mlp.gate_up_proj.method.weight[96:], values(source, UP)
    )


def test_a_tied_head_is_no_tensor():
    assert HEAD in checkpoint().tensor_shapes
    assert HEAD not in checkpoint(tie_word_embeddings=True).tensor_shapes


def test_values_are_random_around_0_and_norms_are_1():
    source = checkpoint(hidden_size=512, intermediate_size=2048)
    assert torch.equal(values(source, NORM), torch.ones(512, dtype=torch.bfloat16))
    weight = values(source, UP).float()
    assert abs(weight.mean()) < 1e-4
    assert weight.std() == pytest.approx(0.02, rel=0.01)
    assert weight.unique().numel() > 1_000
    # Neither rows nor columns repeat.
    assert weight.corrcoef().fill_diagonal_(0).abs().max() < 0.3
    assert weight.T.corrcoef().fill_diagonal_(0).abs().max() < 0.2


def test_values_follow_from_name_and_seed():
    first, second, other = checkpoint(), checkpoint(), checkpoint(seed=1)
    for name in reversed(first.tensor_shapes):
        assert torch.equal(values(first, name), values(second, name)), name
        if "norm" not in name:
            assert not torch.equal(values(first, name), values(other, name)), name
    assert not torch.equal(values(first, UP), values(first, GATE))


def test_a_tensor_larger_than_the_buffer_does_not_repeat_its_rows(monkeypatch):
    small = values(checkpoint(), UP)
    monkeypatch.setattr(dummy, "_MAX_BUFFER_VALUES", 1_001)
    source = checkpoint()
    weight = values(source, UP)
    assert weight.shape == small.shape
    assert weight.float().corrcoef().fill_diagonal_(0).abs().max() < 0.6
    assert torch.equal(weight.flatten()[:-1_001], weight.flatten()[1_001:])
    assert torch.equal(weight, values(checkpoint(), UP))


def test_reading_takes_no_memory_for_each_tensor():
    source = checkpoint()
    storages = {
        source.read(name).data.untyped_storage().data_ptr()
        for name in source.tensor_shapes
        if "norm" not in name
    }
    assert len(storages) == 1


def test_an_unknown_tensor_is_an_error():
    with pytest.raises(CheckpointError, match=r"no tensor 'lm_head.weights'.*'lm_head.weight'"):
        checkpoint().read("lm_head.weights")


def test_a_config_alone_is_a_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    source = open_dummy(tmp_path, tensor_shapes=tensor_shapes, seed=0)
    assert source.config == CONFIG
    assert source.generation_config == {}
    assert source.tokenizer_data.directory == tmp_path
    assert torch.equal(values(source, UP), values(checkpoint(), UP))
    source.close()
    assert torch.equal(values(source, UP), values(checkpoint(), UP))


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no model here"):
        open_dummy(tmp_path, tensor_shapes=tensor_shapes, seed=0)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        open_dummy(tmp_path, tensor_shapes=tensor_shapes, seed=0)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": -1}))
    with pytest.raises(ConfigError, match="hidden_size"):
        open_dummy(tmp_path, tensor_shapes=tensor_shapes, seed=0)


def test_shapes_of_a_model_are_told_without_its_memory():
    huge = CONFIG | {"hidden_size": 1 << 16, "intermediate_size": 1 << 20, "vocab_size": 1 << 30}
    shapes = tensor_shapes(huge)
    assert shapes[HEAD] == (1 << 30, 1 << 16)  # 128 TiB
    tensors = {name: torch.zeros(shape) for name, shape in tensor_shapes(CONFIG).items()}
    load_model(model_config(CONFIG), TensorCheckpoint(CONFIG, tensors))


def test_a_config_with_mxfp4_gets_codes():
    config = {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    source = checkpoint(**config)
    experts = "model.layers.1.mlp.experts.down_proj"
    shape = (3, 64, 3, 16)
    assert source.tensor_shapes[f"{experts}_blocks"] == shape
    codes, scales = (source.read(f"{experts}_{part}") for part in ("blocks", "scales"))
    assert {codes.format, scales.format, source.tensor_formats[f"{experts}_blocks"]} == {"U8"}
    assert codes.data.shape == (prod(shape),)
    assert len(codes.data.unique()) > 200
    assert torch.equal(codes.data, checkpoint(**config).read(f"{experts}_blocks").data)
    assert not torch.equal(codes.data, checkpoint(1, **config).read(f"{experts}_blocks").data)
    assert scales.data.shape == (3 * 64 * 3,)
    model = load_model(model_config(source.config), source, kernels=PlainKernels())
    matrix = model.get_submodule("model.layers.1.mlp.experts").method.down[2].weight
    assert float(matrix.float().std()) == pytest.approx(dummy.STANDARD_DEVIATION, rel=0.2)
    assert abs(float(matrix.float().mean())) < 1e-3
