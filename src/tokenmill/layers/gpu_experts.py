"""The experts of a layer on a GPU: all in one tensor, products grouped by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from tokenmill.errors import ConfigError
from tokenmill.kernels.experts import ClampedGate, Routing
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
    """Plain weights in the activations' dtype."""

    gate_up_bias = None
    down_bias = None

    def __init__(self, shape: ExpertShape, kernels: GpuKernels) -> None:
        """Raises `ConfigError` for what has no kernel."""
        super().__init__()
        if shape.has_bias or isinstance(shape.gate, ClampedGate):
            what = "experts with biases or clamped gates"
        elif kernels.weight_format != "plain":
            what = f"experts with quantization={kernels.weight_format!r}"
        else:
            what = ""
        if what:
            raise ConfigError(
                f"There is no kernel for a GPU yet for {what}. Run this model with device='cpu'."
            )
        self.shape = shape
        sizes = shape.num_experts, shape.hidden_size, shape.intermediate_size
        with kernels.device:
            self.gate_up_weight = empty_parameter(
                sizes[0], 2 * sizes[2], sizes[1], dtype=shape.dtype
            )
            self.down_weight = empty_parameter(*sizes, dtype=shape.dtype)

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
        assert not isinstance(self.shape.gate, ClampedGate)
        gate_up, down = self.gate_up_weight, self.down_weight
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        buffers = MoeBuffers.allocate(x, gate_up, down, chosen.shape[1])
        experts_mlp(x, gate_up, down, chosen, weights, out, buffers, gate=self.shape.gate)
        return out if base is None else out + base


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `LayerKernels.route`."""
    shape = len(logits), routing.num_chosen
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(shape, dtype=torch.int32, device=logits.device)
    moe_routing.route(logits, bias, weights, chosen, routing)
    return weights, chosen
