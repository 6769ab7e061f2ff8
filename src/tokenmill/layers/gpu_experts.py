"""The experts of a layer on a GPU: all in one tensor, products grouped by expert.

plain    the activations' dtype
fp8      float8, a scale a row; products are of bfloat16, since activations are not quantised
int4     four bits, a scale and a minimum for 32 values; read from a checkpoint, or made
mxfp4    four bits as gpt-oss is published, kept for bfloat16 activations
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.kernels.experts import Routing
from tokenmill.kernels.gpu import moe_routing
from tokenmill.kernels.gpu.float8_experts import Float8Experts
from tokenmill.kernels.gpu.four_bit_experts import FourBitExperts
from tokenmill.kernels.gpu.int4 import int4_codes
from tokenmill.kernels.gpu.moe import ExpertWeight, MoeBuffers, experts_mlp
from tokenmill.layers.experts import ExpertShape
from tokenmill.layers.linear_method import Activations, WeightPlace
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot
from tokenmill.quantization.dequantize import dequantize
from tokenmill.quantization.four_bit import (
    FOUR_BIT_FORMATS,
    GROUP_SIZE,
    four_bit_parts,
    mxfp4_parts,
)

if TYPE_CHECKING:
    from tokenmill.layers.gpu import GpuKernels


class ExpertPlace:
    """One expert's part of a tensor, or of codes and scales."""

    bias_dtype = torch.float32

    def __init__(self, weight: ExpertWeight, expert: int) -> None:
        self._weight = weight
        self._expert = expert

    def slot(self, name: str, rows: slice) -> WeightSlot:
        if isinstance(self._weight, torch.Tensor):
            return parameter_slot(name, self._weight[self._expert, rows])

        def load(raw: RawTensor) -> None:
            self._pack(rows, raw)
            raw.release()

        return WeightSlot(name, (rows.stop - rows.start, self._weight.shape[2]), load)

    def _pack(self, rows: slice, raw: RawTensor) -> None:
        weight, expert = self._weight, self._expert
        if isinstance(weight, Float8Experts):
            values = dequantize(raw, torch.bfloat16).to(weight.codes.device)
            weight.quantize(expert, rows, values)
            return
        assert isinstance(weight, FourBitExperts)
        raw.need()
        on_device = replace(raw, data=raw.data.to(weight.codes.device), pages=None)
        if weight.is_mxfp4:
            weight.pack_mxfp4(expert, rows, *mxfp4_parts(on_device))
        elif raw.format in FOUR_BIT_FORMATS:
            weight.pack_int4(expert, rows, *four_bit_parts(on_device))
        else:
            values = dequantize(raw, torch.bfloat16).to(weight.codes.device)
            weight.pack_int4(expert, rows, *int4_codes(values, GROUP_SIZE))


class GpuExperts(nn.Module):
    """Weights in one of the formats above, and float32 biases."""

    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    def __init__(self, shape: ExpertShape, kernels: GpuKernels) -> None:
        super().__init__()
        self.shape = shape
        self.device = kernels.device
        hidden, intermediate = shape.hidden_size, shape.intermediate_size
        with kernels.device:
            self.gate_up_weight = _weight(shape, kernels, 2 * intermediate, hidden)
            self.down_weight = _weight(shape, kernels, hidden, intermediate)
            self.gate_up_bias = _bias(shape, 2 * intermediate)
            self.down_bias = _bias(shape, hidden)

    @property
    def gate_up(self) -> Sequence[WeightPlace]:
        return _places(self.gate_up_weight)

    @property
    def down(self) -> Sequence[WeightPlace]:
        return _places(self.down_weight)

    def empty_input(self, num_rows: int) -> Activations:
        size, dtype = self.shape.hidden_size, self.shape.dtype
        return torch.empty(num_rows, size, dtype=dtype, device=self.device)

    def mix(
        self,
        x: Activations,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        base: torch.Tensor | None,
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        gate_up, down = self.gate_up_weight, self.down_weight
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        experts_mlp(
            x,
            gate_up,
            down,
            chosen,
            weights,
            out,
            MoeBuffers.allocate(x, gate_up, down, chosen.shape[1]),
            gate=self.shape.gate,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
        )
        return out if base is None else out + base


def _weight(
    shape: ExpertShape, kernels: GpuKernels, out_features: int, in_features: int
) -> ExpertWeight:
    sizes = shape.num_experts, out_features, in_features
    keeps_mxfp4 = shape.is_mxfp4 and shape.dtype == torch.bfloat16
    if keeps_mxfp4 or kernels.weight_format == "int4":
        return FourBitExperts.empty(*sizes, kernels.device, is_mxfp4=keeps_mxfp4)
    if kernels.weight_format == "fp8":
        return Float8Experts.empty(*sizes, kernels.device)
    return empty_parameter(*sizes, dtype=shape.dtype)


def _places(weight: ExpertWeight) -> Sequence[WeightPlace]:
    return [ExpertPlace(weight, expert) for expert in range(len(weight))]


def _bias(shape: ExpertShape, size: int) -> torch.Tensor | None:
    if not shape.has_bias:
        return None
    return empty_parameter(shape.num_experts, size, dtype=torch.float32)


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `LayerKernels.route`."""
    shape = len(logits), routing.num_chosen
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(shape, dtype=torch.int32, device=logits.device)
    moe_routing.route(logits, bias, weights, chosen, routing)
    return weights, chosen
