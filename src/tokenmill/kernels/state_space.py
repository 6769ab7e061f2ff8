"""State-space layers (Mamba-2; Dao and Gu, 2024) over the flat batch: a convolution and a scan.

    inputs    | x of all heads | B of all groups | C of all groups |    channels of a convolution
    u         silu(convolution of each channel with its last inputs)
    dt        softplus(dt + dt_bias), within limits
    state     state * exp(dt * a) + dt * x B^T       a matrix [head_size, state_size] a head
    y         state C + d * x
    result    RMSNorm of y * silu(gate), in each group

Everything is float32, token by token, each value by itself and sums along a row of the state. So a
token's bits depend on those before it, and on nothing else.

What is kept of a sequence lies in blocks (`core/kv/groups.py`). A block has two places, each with
the number of tokens that its state has seen: a step reads one and writes the other, so that it may
be run again. Behind every whole block a state is kept, if the block table has a block for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenmill.config.state_space import STATE_PLACES
from tokenmill.contracts.kv_cache import StateSpec
from tokenmill.kernels.activation import activation
from tokenmill.kernels.norm import rms_norm

NOTHING = -1
"""Tokens seen by a state that is none."""


@dataclass(frozen=True, slots=True)
class StateSpaceShape:
    """Sizes of a layer."""

    num_heads: int
    head_size: int
    state_size: int
    num_groups: int
    """Of heads that share B and C."""
    kernel_size: int
    """Inputs that a convolution sees."""
    dt_limits: tuple[float, float]
    norm_eps: float

    @property
    def num_inner(self) -> int:
        """Values of all heads."""
        return self.num_heads * self.head_size

    @property
    def num_channels(self) -> int:
        """Of the convolution."""
        return self.num_inner + 2 * self.num_groups * self.state_size

    @property
    def num_past(self) -> int:
        """Values of a state that are inputs of the convolution."""
        return (self.kernel_size - 1) * self.num_channels

    @property
    def num_matrices(self) -> int:
        """Values of a state in the heads' matrices."""
        return self.num_inner * self.state_size

    @property
    def parts(self) -> list[int]:
        """Columns of a layer's first projection: gates, inputs, dt."""
        return [self.num_inner, self.num_channels, self.num_heads]

    @property
    def spec(self) -> StateSpec:
        """What is kept of a sequence."""
        return StateSpec(
            num_channels=self.num_channels,
            num_past_inputs=self.kernel_size - 1,
            num_heads=self.num_heads,
            head_size=self.head_size,
            state_size=self.state_size,
        )


@dataclass(frozen=True, slots=True)
class StateSpaceWeights:
    """Parameters of a layer, float32."""

    conv_weight: torch.Tensor
    """[kernel_size, num_channels], the oldest input first"""
    conv_bias: torch.Tensor
    """[num_channels]"""
    a: torch.Tensor
    """[num_heads], negative"""
    d: torch.Tensor
    """[num_heads]"""
    dt_bias: torch.Tensor
    """[num_heads]"""
    norm_weight: torch.Tensor
    """[num_heads * head_size]"""


@dataclass(frozen=True, slots=True)
class StateStep:
    """A request's part of a step."""

    rows: slice
    """Of the flat batch."""
    num_seen: int
    """Tokens before them."""
    read_block: int
    """With the state behind these; any if there are none."""
    writes: tuple[tuple[int, int], ...]
    """Behind how many of the rows a state is kept, and in which block; in rising order."""


@dataclass(frozen=True, slots=True)
class StateCache:
    """The blocks of one layer."""

    num_seen: torch.Tensor
    """int64 [num_blocks, 2], tokens that each state has seen, or `NOTHING`"""
    values: torch.Tensor
    """float32 [num_blocks, 2, values of a state]: inputs of the convolution
    [kernel_size - 1, num_channels], then the heads' matrices"""

    @classmethod
    def empty(
        cls, num_blocks: int, spec: StateSpec, device: torch.device | str = "cpu"
    ) -> StateCache:
        """Blocks without a state."""
        return cls(
            torch.full((num_blocks, STATE_PLACES), NOTHING, device=device),
            torch.empty(num_blocks, STATE_PLACES, spec.num_values, device=device),
        )

    def read(self, step: StateStep) -> torch.Tensor:
        """The values before a step; zeros before the first token."""
        if step.num_seen == 0:
            return torch.zeros(self.values.shape[-1])
        return self.values[step.read_block, self._place(step)].clone()

    def write(self, step: StateStep, block: int, num_rows: int, values: torch.Tensor) -> None:
        """Keep the values behind the step's first `num_rows` tokens.

        The state that the step has read stays where it is. No other block keeps an older one.
        """
        place = 0
        if step.num_seen and block == step.read_block:
            place = 1 - self._place(step)
        else:
            self.num_seen[block] = NOTHING
        self.values[block, place] = values
        self.num_seen[block, place] = step.num_seen + num_rows

    def _place(self, step: StateStep) -> int:
        places = self.num_seen[step.read_block].tolist()
        assert step.num_seen in places, f"{step}: its block has states behind {places} tokens"
        return places.index(step.num_seen)


def state_space(
    shape: StateSpaceShape,
    weights: StateSpaceWeights,
    cache: StateCache,
    steps: Sequence[StateStep],
    projected: torch.Tensor,
) -> torch.Tensor:
    """Results of a step, float32 [num_tokens, num_heads * head_size], and its states in the cache.

    projected is [num_tokens, gates, inputs and dt]; rows may lie apart.
    """
    gate, inputs, dt = torch.split(projected.float(), shape.parts, dim=-1)
    out = torch.empty(len(projected), shape.num_inner)
    for step in steps:
        _scan(shape, weights, cache, step, inputs[step.rows], dt[step.rows], out[step.rows])
    groups = (shape.num_groups, shape.num_inner // shape.num_groups)
    gated = (out * activation(gate, "silu")).view(len(out), *groups)
    return rms_norm(gated, weights.norm_weight.view(groups), shape.norm_eps).flatten(1)


def _scan(
    shape: StateSpaceShape,
    weights: StateSpaceWeights,
    cache: StateCache,
    step: StateStep,
    inputs: torch.Tensor,
    dt: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """A request's part, [n, ...]; the results go to out [n, num_heads * head_size]."""
    past, state = torch.split(cache.read(step), [shape.num_past, shape.num_matrices])
    window = torch.cat([past.view(shape.kernel_size - 1, -1), inputs])
    x, b, c = _convolved(shape, weights, window)
    delta = _time_steps(shape, weights, dt)
    decay = torch.exp(delta * weights.a)[:, :, None, None]
    kept = dict(step.writes)
    state = state.view(shape.num_heads, shape.head_size, shape.state_size)
    for token in range(len(x)):
        added = (delta[token][:, None] * x[token])[:, :, None] * b[token][:, None, :]
        state = state * decay[token] + added
        result = (state * c[token][:, None, :]).sum(-1) + weights.d[:, None] * x[token]
        out[token] = result.flatten()
        if token + 1 in kept:
            past = window[token + 1 : token + shape.kernel_size]
            values = torch.cat([past.flatten(), state.flatten()])
            cache.write(step, kept[token + 1], token + 1, values)


def _convolved(
    shape: StateSpaceShape, weights: StateSpaceWeights, window: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the inputs behind the first few: x [n, heads, head_size], B, C [n, heads, state_size]."""
    num_tokens = len(window) - shape.kernel_size + 1
    total = weights.conv_bias.expand(num_tokens, -1)
    for at in range(shape.kernel_size):
        total = total + window[at : at + num_tokens] * weights.conv_weight[at]
    u = activation(total, "silu")
    shared = shape.num_groups * shape.state_size
    x, b, c = torch.split(u, [shape.num_inner, shared, shared], dim=-1)
    heads = shape.num_heads // shape.num_groups
    b, c = (
        each.view(num_tokens, shape.num_groups, -1).repeat_interleave(heads, 1) for each in (b, c)
    )
    return x.view(num_tokens, shape.num_heads, -1), b, c


def _time_steps(
    shape: StateSpaceShape, weights: StateSpaceWeights, dt: torch.Tensor
) -> torch.Tensor:
    """Float32 [n, heads]."""
    dt = dt + weights.dt_bias
    softplus = torch.log1p(torch.exp(dt.clamp(max=20.0)))
    return torch.where(dt > 20.0, dt, softplus).clamp(*shape.dt_limits)
