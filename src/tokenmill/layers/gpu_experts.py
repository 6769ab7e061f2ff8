"""The experts of a layer on a GPU: all in one tensor, products grouped by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from tokenmill.errors import ConfigError
from tokenmill.kernels.experts import Routing
from tokenmill.kernels.gpu import moe_routing
from tokenmill.kernels.gpu.moe import MoeBuffers, experts_mlp
from tokenmill.layers.experts import ExpertShape
from tokenmill.layers.linear_method import Activations, WeightPlace
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot

if TYPE_CHECKING:
    from tokenmill.layers.gpu import GpuKernels


class ExpertPlace:
    """One expert's part of a tensor."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.bias_dtype = weight.dtype
        self._weight = weight

    def slot(self, name: str, rows: slice) -> WeightSlot:
        return parameter_slot(name, self._weight[rows])


class GpuExperts(nn.Module):
    """Plain weights in the activations' dtype, and float32 biases."""

    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    def __init__(self, shape: ExpertShape, kernels: GpuKernels) -> None:
        """Raises `ConfigError` for what has no kernel."""
        super().__init__()
        if kernels.weight_format != "plain":
            raise ConfigError(
                f"There is no kernel for a GPU yet for experts with"
                f" quantization={kernels.weight_format!r}. Run this model with device='cpu'."
            )
        self.shape = shape
        sizes = shape.num_experts, shape.hidden_size, shape.intermediate_size
        with kernels.device:
            self.gate_up_weight = empty_parameter(
                sizes[0], 2 * sizes[2], sizes[1], dtype=shape.dtype
            )
            self.down_weight = empty_parameter(*sizes, dtype=shape.dtype)
            self.gate_up_bias = _bias(shape, 2 * shape.intermediate_size)
            self.down_bias = _bias(shape, shape.hidden_size)

    @property
    def gate_up(self) -> Sequence[WeightPlace]:
        return [ExpertPlace(weight) for weight in self.gate_up_weight]

    @property
    def down(self) -> Sequence[WeightPlace]:
        return [ExpertPlace(weight) for weight in self.down_weight]

    def empty_input(self, num_rows: int) -> Activations:
        return self.down_weight.new_empty(num_rows, self.shape.hidden_size)

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
