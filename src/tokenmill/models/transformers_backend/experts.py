"""Experts of the library on packed weights, through its interface for experts.

The library keeps the matrices of all experts of a layer in one parameter:

    gate_up_proj   [experts, 2 * size, hidden]      or transposed: [experts, hidden, 2 * size]
    down_proj      [experts, hidden, size]          or transposed
    up_proj        in place of gate_up_proj where there are no gates

Here each matrix is one of the kernels'. If what comes between the two products is a gate that the
kernels know, which is found out by trying, they compute all of it; else the library computes that,
expert by expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast, get_args

import torch
from torch import nn

from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.kernels.activation import Gate
from tokenmill.kernels.experts import expert_gate, mix_experts_reference
from tokenmill.layers.experts import ExpertShape
from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.linear_method import LinearMethod, WeightPlace
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot, plain_raw
from tokenmill.models.transformers_backend.ops import our_layers
from tokenmill.quantization.dequantize import plain_values

IMPLEMENTATION = "tokenmill"
"""Our name in the library's registers."""
PACKED = "tokenmill_experts"
"""Name of our module inside the library's."""
_LARGEST_TRIED = 40.0
"""A gate that limits its inputs does so far below."""


class ExpertMatrices:
    """Where the matrices and biases of one name go, of all experts of a layer."""

    def __init__(
        self,
        shape: tuple[int, ...],
        places: Sequence[WeightPlace],
        bias: torch.Tensor | None,
        *,
        is_transposed: bool,
    ) -> None:
        """`shape` is the library's, of all experts."""
        self.shape = shape
        self.places = places
        self.bias = bias
        self.is_transposed = is_transposed

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(name, self.shape, self._load)
        if self.bias is not None:
            yield parameter_slot(f"{name}_bias", self.bias)

    def own_slots(self, names: Sequence[Sequence[str]]) -> Iterator[WeightSlot]:
        """In place of the first of these: a slot for each expert's own tensors, of which several
        lie one below the other. What is in blocks stays so.
        """
        for place, parts in zip(self.places, names, strict=True):
            rows = self.shape[1] // len(parts)
            for index, part in enumerate(parts):
                yield place.slot(part, slice(index * rows, (index + 1) * rows))

    def _load(self, raw: RawTensor) -> None:
        for place, values in zip(self.places, plain_values(raw), strict=True):
            matrix = values.t() if self.is_transposed else values
            place.slot("", slice(0, matrix.shape[0])).load(plain_raw(matrix))


class PackedExperts(nn.Module):
    """All experts of a layer, in the place of the parameters of the library's module."""

    def __init__(self, owner: nn.Module, dtype: torch.dtype, kernels: LayerKernels) -> None:
        super().__init__()
        self.names = _names(owner)
        self.dtype = dtype
        shapes = [tuple(owner.get_parameter(name).shape) for name in self.names]
        sizes = [_matrix_shape(shape, bool(owner.is_transposed)) for shape in shapes]
        self.num_experts = shapes[0][0]
        has_bias = bool(owner.has_bias)
        gate = _known_gate(owner, sizes[1][1])
        places: list[Sequence[WeightPlace]]
        biases: list[torch.Tensor | None]
        if gate is None:
            self.method = None
            methods = [
                [kernels.linear_method(*size, dtype) for _ in range(self.num_experts)]
                for size in sizes
            ]
            biases = [
                empty_parameter(self.num_experts, size[0], dtype=each[0].bias_dtype)
                if has_bias
                else None
                for size, each in zip(sizes, methods, strict=True)
            ]
            places = [*methods]
        else:
            hidden_size, intermediate_size = sizes[1]
            shape = ExpertShape(
                self.num_experts, hidden_size, intermediate_size, dtype, gate, has_bias
            )
            self.method = kernels.experts_method(shape)
            places = [self.method.gate_up, self.method.down]
            biases = [self.method.gate_up_bias, self.method.down_bias]
        self.matrices = [
            ExpertMatrices(*each, is_transposed=bool(owner.is_transposed))
            for each in zip(shapes, places, biases, strict=True)
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
        rows = x.to(self.dtype).contiguous()
        weights, chosen = weights.float().contiguous(), chosen.int().contiguous()
        if self.method is not None:
            with our_layers():
                return self.method.mix(rows, weights, chosen, None).to(x.dtype)

        def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
            found = self._project(0, expert, rows)
            found = owner._apply_gate(found) if owner.has_gate else owner.act_fn(found)
            found = self._project(1, expert, found)
            return owner.post_expert_norm(found) if owner.has_post_expert_norm else found

        return mix_experts_reference(rows, weights, chosen, run, self.num_experts).to(x.dtype)

    def _project(self, which: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Rows x [n, in_features] through one expert's matrix: [n, out_features]."""
        matrices = self.matrices[which]
        method = cast(LinearMethod, matrices.places[expert])
        bias = None if matrices.bias is None else matrices.bias[expert]
        with our_layers():
            return method.project(x.to(self.dtype), bias, self.dtype)


def _matrix_shape(shape: tuple[int, ...], is_transposed: bool) -> tuple[int, int]:
    """(out_features, in_features) of one expert."""
    _, rows, columns = shape
    return (columns, rows) if is_transposed else (rows, columns)


def _known_gate(owner: Any, size: int) -> Gate | None:
    """The kernels' gate that gives what the library's does on gates and ups of `size` each, gates
    first; None if none does.
    """
    inner = getattr(owner, "act_fn", None)
    has_weights = isinstance(inner, nn.Module) and any(True for _ in inner.parameters())
    if not owner.has_gate or owner.has_post_expert_norm or has_weights:
        return None
    ramp = torch.linspace(-_LARGEST_TRIED, _LARGEST_TRIED, size)
    sample = torch.cat([ramp, ramp.flip(0) * 0.7 + 1.0])[None]
    found = owner._apply_gate(sample)
    for gate in get_args(Gate):
        wanted = expert_gate(sample, gate)
        if found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-4, rtol=1e-5):
            return cast(Gate, gate)
    return None


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
