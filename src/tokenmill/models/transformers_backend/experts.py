"""Experts of the library on packed weights, through its interface for experts.

The library keeps the matrices of all experts of a layer in one parameter:

    gate_up_proj   [experts, 2 * size, hidden]      or transposed: [experts, hidden, 2 * size]
    down_proj      [experts, hidden, size]          or transposed
    up_proj        in place of gate_up_proj where there are no gates

Here each matrix is one of the kernels', and an expert's rows lie side by side. What comes between
the two products, the library computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.kernels.experts import mix_experts_reference
from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.linear_method import LinearMethod
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot, plain_raw
from tokenmill.models.transformers_backend.ops import our_layers
from tokenmill.quantization.dequantize import plain_values

IMPLEMENTATION = "tokenmill"
"""Our name in the library's registers."""
PACKED = "tokenmill_experts"
"""Name of our module inside the library's."""


class ExpertMatrices:
    """The matrices and biases of one name, of all experts of a layer."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        is_transposed: bool,
        has_bias: bool,
        dtype: torch.dtype,
        kernels: LayerKernels,
    ) -> None:
        """`shape` is the library's."""
        num_experts, rows, columns = shape
        if is_transposed:
            rows, columns = columns, rows
        self.shape = shape
        self.is_transposed = is_transposed
        self.dtype = dtype
        self.methods: list[LinearMethod] = [
            kernels.linear_method(rows, columns, dtype) for _ in range(num_experts)
        ]
        self.bias = (
            empty_parameter(num_experts, rows, dtype=self.methods[0].bias_dtype)
            if has_bias
            else None
        )

    def project(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Rows x [n, in_features] through one expert's matrix: [n, out_features]."""
        bias = None if self.bias is None else self.bias[expert]
        with our_layers():
            return self.methods[expert].project(x.to(self.dtype), bias, self.dtype)

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(name, self.shape, self._load)
        if self.bias is not None:
            yield parameter_slot(f"{name}_bias", self.bias)

    def _load(self, raw: RawTensor) -> None:
        for method, values in zip(self.methods, plain_values(raw), strict=True):
            matrix = values.t() if self.is_transposed else values
            method.slot("", slice(0, matrix.shape[0])).load(plain_raw(matrix))


class PackedExperts(nn.Module):
    """All experts of a layer, in the place of the parameters of the library's module."""

    def __init__(self, owner: nn.Module, dtype: torch.dtype, kernels: LayerKernels) -> None:
        super().__init__()
        self.names = _names(owner)
        self.num_experts = len(owner.get_parameter(self.names[0]))
        self.matrices = [
            ExpertMatrices(
                tuple(owner.get_parameter(name).shape),  # type: ignore[arg-type]
                is_transposed=bool(owner.is_transposed),
                has_bias=bool(owner.has_bias),
                dtype=dtype,
                kernels=kernels,
            )
            for name in self.names
        ]

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        parent = prefix.rpartition(".")[0]
        for name, matrices in zip(self.names, self.matrices, strict=True):
            yield from matrices.weight_slots(f"{parent}.{name}")

    def forward(
        self, owner: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Map x [n, hidden_size] to the same shape and dtype.

        `chosen` and `weights` [n, k] are the experts of each token and what they count.
        """
        first, last = self.matrices

        def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
            found = first.project(expert, rows)
            found = owner._apply_gate(found) if owner.has_gate else owner.act_fn(found)
            found = last.project(expert, found)
            return owner.post_expert_norm(found) if owner.has_post_expert_norm else found

        mixed = mix_experts_reference(x, weights.float(), chosen, run, self.num_experts)
        return mixed.to(x.dtype)


def pack_experts(model: nn.Module, dtype: torch.dtype, kernels: LayerKernels) -> bool:
    """Put `PackedExperts` into every module with experts; whether all of them could be."""
    owners = [each for each in model.modules() if _is_interfaced(each)]
    if not all(_fits(owner) for owner in owners):
        return False
    for owner in owners:
        packed = PackedExperts(owner, dtype, kernels)
        for name in packed.names:
            setattr(owner, name, None)
            if packed.matrices[0].bias is not None:
                setattr(owner, f"{name}_bias", None)
        owner.add_module(PACKED, packed)
    return True


def run_experts(
    owner: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """What the library calls for a module with experts."""
    found: torch.Tensor = owner.get_submodule(PACKED)(
        owner, hidden_states, top_k_index, top_k_weights
    )
    return found


def _is_interfaced(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("is_transposed", "has_bias", "has_gate"))


def _names(owner: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if owner.has_gate else "up_proj", "down_proj")


def _fits(owner: nn.Module) -> bool:
    """Whether its parameters are those that are drawn above, and no others."""
    wanted = set(_names(owner))
    if owner.has_bias:
        wanted |= {f"{name}_bias" for name in wanted}
    own = dict(owner.named_parameters(recurse=False))
    return set(own) == wanted and all(own[name].ndim == 3 for name in _names(owner))
