"""Experts on the GPU's kernels (interpreted where there is none), by how their weights are kept."""

from __future__ import annotations

import os

import pytest
import torch

from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.kernels.gpu.float8_experts import Float8Experts
from tokenmill.kernels.gpu.four_bit_experts import FourBitExperts
from tokenmill.layers.experts import ExpertShape, ExpertsMethod
from tokenmill.layers.gpu import GpuKernels, WeightFormat
from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.moe import separate_expert_slots
from tokenmill.layers.plain import PlainKernels
from tokenmill.layers.weights import plain_raw
from tokenmill.quantization.dequantize import dequantize

DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")
SHAPE = ExpertShape(4, 64, 96, torch.bfloat16, has_bias=True)
KEPT: dict[WeightFormat, tuple[type, float]] = {
    "plain": (torch.Tensor, 0.01),
    "fp8": (Float8Experts, 0.08),
    "int4": (FourBitExperts, 0.3),
}
"""Where weights go, and the most relative error of a layer."""


def layer(kernels: LayerKernels, weights: dict[str, torch.Tensor]) -> ExpertsMethod:
    """A layer's experts; weights that are missing are drawn and remembered."""
    with kernels.device:
        method = kernels.experts_method(SHAPE)
    for slot in separate_expert_slots(method, SHAPE, "experts"):
        if slot.name not in weights:
            weights[slot.name] = (torch.randn(slot.shape) / 8).bfloat16()
        slot.load(plain_raw(weights[slot.name]))
    for name in ("gate_up_bias", "down_bias"):
        bias = getattr(method, name)
        weights.setdefault(name, torch.randn(bias.shape).bfloat16())
        bias.copy_(weights[name])
    return method


@pytest.mark.parametrize("weight_format", KEPT)
def test_a_layer_of_experts(weight_format: WeightFormat) -> None:
    """Beside torch's, with whose weights it is filled."""
    kept, most = KEPT[weight_format]
    weights: dict[str, torch.Tensor] = {}
    ours = layer(GpuKernels(DEVICE, exact=True, weight_format=weight_format), weights)
    plain = layer(PlainKernels(DEVICE), weights)
    assert isinstance(ours.gate_up_weight, kept)
    assert isinstance(ours.down_weight, kept)
    room = ours.empty_input(3)
    assert (room.shape, room.dtype, room.device.type) == ((3, 64), torch.bfloat16, DEVICE.type)
    x, chances = torch.randn(5, 64).bfloat16().to(DEVICE), torch.rand(5, 2, device=DEVICE)
    chosen = torch.tensor([[0, 3], [1, 2], [2, 0], [3, 1], [1, 0]], device=DEVICE).int()
    wanted = plain.mix(x, chances, chosen, x)
    found = ours.mix(x, chances, chosen, x)
    assert found.dtype == torch.float32
    assert (found - wanted).norm() / wanted.norm() < most


def test_four_bit_codes_of_a_checkpoint_are_kept() -> None:
    blocks = torch.randint(0, 256, (128 * 2, 18), dtype=torch.uint8)
    blocks[:, :2] = (2.0 ** torch.randint(-6, -3, (len(blocks), 1))).half().view(torch.uint8)
    stored = RawTensor((128, 64), "Q4_0", blocks.view(-1))
    method = GpuKernels(DEVICE, exact=True, weight_format="int4").experts_method(SHAPE)
    method.gate_up[2].slot("weight", slice(64, 192)).load(stored)
    kept = method.gate_up_weight.unpack(2)[64:]
    assert torch.equal(kept.cpu(), dequantize(stored, torch.bfloat16))
