"""gpt-oss as it is published: experts in MXFP4."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from helpers.families import FAMILIES
from helpers.models import PagedRun, model_from_tensors
from helpers.ranks import together
from tokenmill.errors import CheckpointError, ConfigError
from tokenmill.kernels import native
from tokenmill.kernels.gpu.four_bit_experts import FourBitExperts
from tokenmill.layers.gpu import GpuKernels
from tokenmill.layers.packed import NativeKernels
from tokenmill.layers.plain import PlainKernels
from tokenmill.models.gpt_oss import GptOssForCausalLM as OurGptOss
from tokenmill.parallel.group import SharedMemoryGroup

SIZE = 160
"""Features of an expert."""


def published(
    size: int = SIZE,
) -> tuple[GptOssForCausalLM, dict[str, Any], dict[str, torch.Tensor]]:
    """transformers' model with what the codes stand for, its config, and tensors with the codes."""
    (family,) = (each for each in FAMILIES if each.name == "gpt-oss")
    torch.manual_seed(0)
    settings = family.settings() | {"intermediate_size": size}
    config = GptOssConfig(**settings, attn_implementation="eager")
    model = GptOssForCausalLM(config).eval()
    tensors = dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    for layer in range(config.num_hidden_layers):
        for part, rows, groups in (("gate_up_proj", 2 * size, 4), ("down_proj", 128, size // 32)):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            shape = (config.num_local_experts, rows, groups)
            blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)
            values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            model.get_parameter(name).data.copy_(values)
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    hf_config = config.to_dict() | {
        "architectures": ["GptOssForCausalLM"],
        "quantization_config": {"quant_method": "mxfp4"},
    }
    return model, hf_config, tensors


@pytest.mark.parametrize("kernels", [PlainKernels(), None], ids=["torch", "native"])
@torch.inference_mode()
def test_logits_equal_transformers(kernels: PlainKernels | None) -> None:
    theirs, hf_config, tensors = published()
    model = model_from_tensors(hf_config, tensors, kernels=kernels)
    ids = torch.randint(97, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    found = model.compute_logits(PagedRun(model, "float32").prefill("a", ids))
    expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_codes_serve_bfloat16() -> None:
    """Near, and the same in pieces; the native kernels keep the codes."""
    theirs, hf_config, tensors = published()
    model = model_from_tensors(hf_config, tensors, "bfloat16")
    ids = torch.randint(97, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    hidden = PagedRun(model, "bfloat16").prefill("a", ids)
    assert torch.equal(PagedRun(model, "bfloat16", seed=1).prefill("a", ids, chunk=7), hidden)
    x = torch.randn(9, 128)
    of_theirs = theirs.model.layers[1].mlp.experts
    of_ours = model.get_submodule("model.layers.1.mlp.experts")
    expected = x @ of_theirs.gate_up_proj[3] + of_theirs.gate_up_proj_bias[3]
    expected = torch.cat([expected[:, 0::2], expected[:, 1::2]], dim=-1)  # gates, then ups
    bias = of_ours.method.gate_up_bias[3]
    found = of_ours.method.gate_up[3].project(x.bfloat16(), bias, torch.bfloat16)
    error = (found - expected).norm() / expected.norm()
    assert error < 0.01


@torch.inference_mode()
def test_codes_are_kept_on_a_gpu_for_bfloat16() -> None:
    theirs, hf_config, tensors = published()
    weights, chosen = torch.rand(5, 2), torch.tensor([[0, 3], [5, 1], [2, 0], [4, 5], [3, 1]]).int()
    x = torch.randn(5, 128).bfloat16()
    results = []
    for dtype, rounding in (("bfloat16", 0.01), ("float32", 1e-5)):
        kernels = GpuKernels(torch.device("cpu"), exact=True)
        model = model_from_tensors(hf_config, tensors, dtype, kernels=kernels)
        method = model.get_submodule("model.layers.1.mlp.experts").method
        stored = method.gate_up_weight
        assert isinstance(stored, FourBitExperts) == (dtype == "bfloat16")
        kept = stored.unpack(3) if isinstance(stored, FourBitExperts) else stored[3]
        wanted = theirs.model.layers[1].mlp.experts.gate_up_proj[3].t()
        assert torch.equal(kept.float(), torch.cat([wanted[0::2], wanted[1::2]])), "no rounding"
        results.append(method.mix(x.to(kept.dtype), weights, chosen, None))
        plain = model_from_tensors(hf_config, tensors, kernels=PlainKernels())
        reference = plain.get_submodule("model.layers.1.mlp.experts").method
        expected = reference.mix(x.float(), weights, chosen, None)
        assert (results[-1] - expected).norm() / expected.norm() < rounding


@pytest.mark.skipif(not native.is_available(), reason="needs the native kernels")
@torch.inference_mode()
def test_codes_are_divided_among_ranks_by_whole_groups() -> None:
    theirs, hf_config, tensors = published(size=192)
    ids = torch.randint(97, (60,), generator=torch.Generator().manual_seed(2)).tolist()

    @torch.inference_mode()
    def compute(group: SharedMemoryGroup) -> torch.Tensor:
        model = model_from_tensors(hf_config, tensors, kernels=NativeKernels(group=group))
        return model.compute_logits(PagedRun(model, "float32").prefill("a", ids))

    expected = theirs(torch.tensor([ids])).logits[0]
    for found in together(2, compute):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    _, hf_config, tensors = published()
    with pytest.raises(CheckpointError, match="160 columns in MXFP4 cannot be divided"):
        together(2, compute)


def test_another_quantisation_is_refused() -> None:
    _, hf_config, _ = published()
    hf_config["quantization_config"] = {"quant_method": "awq"}
    with pytest.raises(ConfigError, match=r"'awq'.*only quant_method 'mxfp4'"):
        OurGptOss(hf_config, dtype=torch.float32, max_model_len=16)
