"""State-space layers: what they keep of a sequence, and the mixer of Mamba-2 (Dao and Gu, 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tokenmill.attention.backend import AttentionMetadataBuilder
from tokenmill.attention.forward_context import get_attention_metadata
from tokenmill.contracts.kv_cache import StateSpec
from tokenmill.kernels.state_space import StateCache, StateSpaceShape, StateSpaceWeights
from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.linear import Linear
from tokenmill.layers.linear_method import Activations
from tokenmill.layers.state_steps import StateSpace
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot


class Mamba2Mixer(nn.Module):
    """Projection, convolution and scan, a gated norm over groups, and the projection back."""

    def __init__(
        self,
        layer_name: str,
        *,
        hidden_size: int,
        shape: StateSpaceShape,
        bias: bool,
        conv_bias: bool,
        dtype: torch.dtype,
        kernels: LayerKernels,
    ) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.shape = shape
        self.kernels = kernels
        shared: dict[str, Any] = {"bias": bias, "dtype": dtype, "kernels": kernels}
        self.in_proj = Linear(hidden_size, sum(shape.parts), **shared)
        self.out_proj = Linear(shape.num_inner, hidden_size, **shared)
        self.has_conv_bias = conv_bias
        self.conv_weight = _float32(shape.num_channels, 1, shape.kernel_size)
        self.conv_bias = _float32(shape.num_channels)
        if not conv_bias:
            self.conv_bias.zero_()
        self.log_a, self.d, self.dt_bias = (_float32(shape.num_heads) for _ in range(3))
        self.norm_weight = _float32(shape.num_inner)
        self._derived: StateSpaceWeights | None = None
        self._states: StateSpace | None = None
        self._state_cache: StateCache | None = None

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield parameter_slot(f"{prefix}.conv1d.weight", self.conv_weight)
        if self.has_conv_bias:
            yield parameter_slot(f"{prefix}.conv1d.bias", self.conv_bias)
        yield parameter_slot(f"{prefix}.A_log", self.log_a)
        yield parameter_slot(f"{prefix}.D", self.d)
        yield parameter_slot(f"{prefix}.dt_bias", self.dt_bias)
        yield parameter_slot(f"{prefix}.norm.weight", self.norm_weight)

    @property
    def state_spec(self) -> StateSpec:
        """What this layer keeps of a sequence."""
        return self.shape.spec

    def metadata_builder(self, block_size: int, num_blocks: int) -> AttentionMetadataBuilder:
        """What prepares a step for layers like this one, with so many blocks."""
        return self.kernels.state_builder(block_size, num_blocks)

    def bind(self, cache: StateCache) -> None:
        """Attach this layer's blocks; its weights are loaded."""
        weights = StateSpaceWeights(
            conv_weight=self.conv_weight[:, 0].t().contiguous(),
            conv_bias=self.conv_bias,
            a=-torch.exp(self.log_a),
            d=self.d,
            dt_bias=self.dt_bias,
            norm_weight=self.norm_weight,
        )
        self._derived = weights
        self._states = self.kernels.state_space(self.shape, weights, cache)
        self._state_cache = cache

    def refresh(self) -> None:
        """Compute again what `bind` has computed of the weights, which have changed."""
        if self._derived is not None:
            self._derived.conv_weight.copy_(self.conv_weight[:, 0].t())
            torch.exp(self.log_a, out=self._derived.a).neg_()

    @property
    def state_cache(self) -> StateCache:
        """The blocks that `bind` has attached."""
        assert self._state_cache is not None, "bind comes first"
        return self._state_cache

    def empty_input(self, num_rows: int) -> Activations:
        """A place for this block's input, in the form in which it is read."""
        return self.in_proj.empty_input(num_rows)

    def forward(self, positions: torch.Tensor, x: Activations) -> torch.Tensor:
        """Map x [N, hidden_size] to the same shape; where tokens stand is in the metadata."""
        if self._states is None:
            raise RuntimeError(f"Layer {self.layer_name!r} has no blocks for states: call bind.")
        projected = self.in_proj(x)
        out = self.out_proj.empty_input(len(projected))
        self._states.run(get_attention_metadata(self.layer_name), projected, out)
        return self.out_proj(out)  # type: ignore[no-any-return]


def state_layers(model: object) -> Mapping[str, Mamba2Mixer]:
    """The layers of a model that keep states, by name, in order of depth."""
    if not isinstance(model, nn.Module):
        return {}
    found = (module for module in model.modules() if isinstance(module, Mamba2Mixer))
    return {layer.layer_name: layer for layer in found}


def _float32(*shape: int) -> nn.Parameter:
    return empty_parameter(*shape, dtype=torch.float32)
