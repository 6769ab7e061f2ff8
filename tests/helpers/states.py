"""Random state-space layers, and steps over the states of sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tokenmill.attention.backend import CommonAttentionMetadata
from tokenmill.kernels.state_space import StateCache, StateSpaceShape, StateSpaceWeights

BLOCK_SIZE = 8


def random_weights(shape: StateSpaceShape, generator: torch.Generator) -> StateSpaceWeights:
    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    return StateSpaceWeights(
        conv_weight=draw(shape.kernel_size, shape.num_channels),
        conv_bias=draw(shape.num_channels),
        a=-torch.exp(draw(shape.num_heads)),
        d=draw(shape.num_heads),
        dt_bias=draw(shape.num_heads),
        norm_weight=draw(shape.num_inner),
    )


@dataclass
class Sequences:
    """Whole sequences of projected inputs, of which steps compute parts."""

    shape: StateSpaceShape
    projected: list[torch.Tensor]
    """[length, gates, inputs and dt] each"""
    cache: StateCache
    block_table: torch.Tensor
    """int32 [num_sequences, blocks]; all blocks are real"""
    num_computed: list[int] = field(default_factory=list)

    @classmethod
    def random(cls, shape: StateSpaceShape, lengths: list[int], dtype: torch.dtype) -> Sequences:
        generator = torch.Generator().manual_seed(len(lengths))
        needed = [-(-length // BLOCK_SIZE) for length in lengths]
        free = (torch.randperm(sum(needed), generator=generator) + 1).int().split(needed)
        table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
        for i, blocks in enumerate(free):
            table[i, : len(blocks)] = blocks
        cache = StateCache.empty(sum(needed) + 1, shape.spec)
        cache.values.fill_(torch.nan)
        columns = sum(shape.parts)
        return cls(
            shape,
            [torch.randn(n, columns, generator=generator).to(dtype) for n in lengths],
            cache,
            table,
            [0] * len(lengths),
        )

    def common(self, counts: list[int]) -> CommonAttentionMetadata:
        """The next `counts` tokens of each sequence as a step."""
        ends = [done + count for done, count in zip(self.num_computed, counts, strict=True)]
        return CommonAttentionMetadata(
            num_reqs=len(counts),
            num_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=max(ends),
            query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            block_table=self.block_table,
            slot_mapping=torch.zeros(sum(counts), dtype=torch.int64),
        )

    def inputs(self, counts: list[int]) -> torch.Tensor:
        """Projected inputs of that step."""
        parts = zip(self.projected, self.num_computed, counts, strict=True)
        return torch.cat([rows[done : done + count] for rows, done, count in parts])

    def advance(self, counts: list[int]) -> None:
        """The step is done."""
        self.num_computed = [a + b for a, b in zip(self.num_computed, counts, strict=True)]


def exact_results(
    shape: StateSpaceShape, weights: StateSpaceWeights, projected: torch.Tensor
) -> torch.Tensor:
    """A whole sequence in float64, by the definition: [length, num_heads * head_size]."""
    w = {name: getattr(weights, name).double() for name in weights.__dataclass_fields__}
    gate, inputs, dt = projected.double().split(shape.parts, dim=-1)
    padded = torch.cat([inputs.new_zeros(shape.kernel_size - 1, inputs.shape[1]), inputs])
    u = torch.nn.functional.conv1d(
        padded.t()[None], w["conv_weight"].t()[:, None], w["conv_bias"], groups=shape.num_channels
    )[0].t()
    u = torch.nn.functional.silu(u)
    shared = shape.num_groups * shape.state_size
    x, b, c = u.split([shape.num_inner, shared, shared], dim=-1)
    heads = shape.num_heads // shape.num_groups
    x = x.view(len(x), shape.num_heads, -1)
    b, c = (y.view(len(x), shape.num_groups, -1).repeat_interleave(heads, 1) for y in (b, c))
    dt = torch.nn.functional.softplus(dt + w["dt_bias"]).clamp(*shape.dt_limits)
    state = x.new_zeros(shape.num_heads, shape.head_size, shape.state_size)
    results = []
    for t in range(len(x)):
        state = state * torch.exp(dt[t] * w["a"])[:, None, None]
        state = state + torch.einsum("h,hp,hn->hpn", dt[t], x[t], b[t])
        y = torch.einsum("hpn,hn->hp", state, c[t]) + w["d"][:, None] * x[t]
        results.append(y.flatten())
    y = torch.stack(results) * torch.nn.functional.silu(gate)
    groups = y.view(len(y), shape.num_groups, -1)
    normed = groups / torch.sqrt(groups.square().mean(-1, keepdim=True) + shape.norm_eps)
    return normed.flatten(1) * w["norm_weight"]
