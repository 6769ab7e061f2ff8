"""The attention block: projections around grouped-query attention."""

from __future__ import annotations

import torch
from torch import nn

from tokenmill.layers.attention import Attention
from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.linear_method import Activations
from tokenmill.layers.parallel_linear import ColumnParallelLinear, RowParallelLinear
from tokenmill.layers.rope import RotaryEmbedding
from tokenmill.parallel.shares import even_share, kv_head_share


class SelfAttention(nn.Module):
    """Attention of a sequence to its past.

    Queries, keys and values are one projection. `q_norm` and `k_norm` map all queries or keys of a
    token, [N, num_heads * head_size], before they are rotated.
    """

    def __init__(
        self,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        rotary: RotaryEmbedding | None,
        dtype: torch.dtype,
        kernels: LayerKernels,
        bias: bool = False,
        out_bias: bool = False,
        is_fused: bool = False,
        scale: float | None = None,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        has_sinks: bool = False,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        input_size: int | None = None,
    ) -> None:
        """`scale` is head_size ** -0.5 by default. With `is_fused`, the checkpoint has one matrix
        `qkv_proj`. `input_size` is that of what is read, by default `hidden_size`.
        """
        super().__init__()
        heads = even_share(num_heads, kernels.group.rank, kernels.group.size)
        kv_heads = kv_head_share(num_kv_heads, kernels.group.rank, kernels.group.size)
        self.q_size = heads.size * head_size
        self.kv_size = kv_heads.size * head_size
        parts = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        rows = {name: share.of(head_size) for name, share in parts.items()}
        self.qkv_proj = ColumnParallelLinear(
            input_size or hidden_size,
            list(rows.values()) if is_fused else rows,
            bias=bias,
            dtype=dtype,
            kernels=kernels,
        )
        self.q_norm = q_norm or nn.Identity()
        self.k_norm = k_norm or nn.Identity()
        self.attn = Attention(
            f"{name}.attn",
            num_heads=heads.size,
            heads=heads,
            num_kv_heads=kv_heads.size,
            head_size=head_size,
            scale=head_size**-0.5 if scale is None else scale,
            rotary=rotary,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            has_sinks=has_sinks,
        )
        self.o_proj = RowParallelLinear(
            heads.of(head_size), hidden_size, bias=out_bias, dtype=dtype, kernels=kernels
        )

    def empty_input(self, num_rows: int) -> Activations:
        """A place for this block's input, in the form in which it is read."""
        return self.qkv_proj.empty_input(num_rows)

    def forward(self, positions: torch.Tensor, x: Activations) -> torch.Tensor:
        """Map x [N, input_size] to [N, hidden_size]; positions are int64 [N]."""
        qkv = self.qkv_proj(x)
        query, key, value = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        out = self.attn(positions, self.q_norm(query), self.k_norm(key), value)
        return self.o_proj(out)  # type: ignore[no-any-return]
