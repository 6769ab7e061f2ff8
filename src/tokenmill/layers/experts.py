"""The experts of a layer on each kind of kernels: places for their weights, and the whole of them.

    gate_up    [2 * intermediate_size, hidden_size] of each expert, the gates first
    down       [hidden_size, intermediate_size]

Each matrix is a `LinearMethod`, so a weight format serves experts as it serves other layers, and an
expert is packed as soon as its tensors have been read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from tokenmill.kernels import arena, fused
from tokenmill.kernels.experts import (
    ExpertGate,
    PackedExperts,
    expert_gate,
    mix_experts,
    mix_experts_reference,
)
from tokenmill.kernels.gemm import QuantizedRows
from tokenmill.layers.linear_method import Activations, LinearMethod, WeightPlace
from tokenmill.layers.weights import empty_parameter

if TYPE_CHECKING:
    from tokenmill.layers.packed import PackedLinearMethod


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What the experts of a layer are."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    """Of the activations."""
    gate: ExpertGate = "silu"
    has_bias: bool = False
    is_mxfp4: bool = False
    """Whether the checkpoint has them in MXFP4, which kernels may keep."""


class ExpertsMethod(Protocol):
    """The experts of a layer."""

    @property
    def gate_up(self) -> Sequence[WeightPlace]:
        """By expert."""

    @property
    def down(self) -> Sequence[WeightPlace]:
        """By expert."""

    @property
    def gate_up_bias(self) -> torch.Tensor | None:
        """[num_experts, 2 * intermediate_size]"""

    @property
    def down_bias(self) -> torch.Tensor | None:
        """[num_experts, hidden_size]"""

    def empty_input(self, num_rows: int) -> Activations:
        """Where whoever makes the input may write it."""
        ...

    def mix(
        self,
        x: Activations,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        base: torch.Tensor | None,
    ) -> torch.Tensor:
        """Of x [N, hidden_size], with what a router says of it: the weighted sum, plus `base`
        [N, hidden_size], in float32.
        """
        ...


class _Experts:
    """Places for the weights."""

    def __init__(
        self, shape: ExpertShape, linear_method: Callable[[int, int, torch.dtype], LinearMethod]
    ) -> None:
        self.shape = shape
        self.gate_up: Sequence[LinearMethod] = [
            linear_method(2 * shape.intermediate_size, shape.hidden_size, shape.dtype)
            for _ in range(shape.num_experts)
        ]
        self.down: Sequence[LinearMethod] = [
            linear_method(shape.hidden_size, shape.intermediate_size, shape.dtype)
            for _ in range(shape.num_experts)
        ]
        self.gate_up_bias = self._bias(2 * shape.intermediate_size)
        self.down_bias = self._bias(shape.hidden_size)

    def _bias(self, size: int) -> torch.Tensor | None:
        if not self.shape.has_bias:
            return None
        return empty_parameter(self.shape.num_experts, size, dtype=self.gate_up[0].bias_dtype)


class PlainExperts(_Experts):
    """Expert by expert in torch: the reference."""

    def empty_input(self, num_rows: int) -> Activations:
        return self.gate_up[0].empty_input(num_rows)

    def mix(
        self,
        x: Activations,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        base: torch.Tensor | None,
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        mixed = mix_experts_reference(x, weights, chosen, self._run, self.shape.num_experts)
        return mixed if base is None else mixed + base

    def _run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up[expert].project(x, _of(self.gate_up_bias, expert), x.dtype)
        activated = expert_gate(gate_up, self.shape.gate)
        return self.down[expert].project(activated, _of(self.down_bias, expert), x.dtype)


class NativeExperts(_Experts):
    """All of them in one kernel call."""

    gate_up: Sequence[PackedLinearMethod]
    down: Sequence[PackedLinearMethod]
    _packed: PackedExperts | None = None

    def empty_input(self, num_rows: int) -> Activations:
        if self.packed().reads_plain:
            return arena.empty(num_rows, self.shape.hidden_size, dtype=self.shape.dtype)
        return fused.empty_quantized(num_rows, self.shape.hidden_size)

    def mix(
        self,
        x: Activations,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        base: torch.Tensor | None,
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor | QuantizedRows)
        shape = self.shape
        return mix_experts(
            x, weights, chosen, self.packed(), shape.gate, dtype=shape.dtype, base=base
        )

    def packed(self) -> PackedExperts:
        """The loaded weights, as the kernel takes them."""
        if self._packed is None:
            self._packed = PackedExperts(self.shape.hidden_size, self.shape.intermediate_size)
            for expert in range(self.shape.num_experts):
                self._packed.add(
                    self.gate_up[expert].weights,
                    self.down[expert].weights,
                    _of(self.gate_up_bias, expert),
                    _of(self.down_bias, expert),
                )
        return self._packed


def _of(biases: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if biases is None else biases[expert]
