"""Rotary position embedding (Su et al., 2021), halves paired as in Hugging Face checkpoints."""

from __future__ import annotations

import torch


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [N, num_heads, head_size]; cos and sin are float32 [N, rotary_dim / 2].

    Elements i and i + rotary_dim / 2 of a head are a pair. What lies behind rotary_dim passes.
    Computed in float32 and rounded once to x's dtype.

        | x1 | x2 | rest |  ->  | x1 cos - x2 sin | x2 cos + x1 sin | rest |
    """
    half = cos.shape[-1]
    x1, x2, rest = torch.tensor_split(x.float(), (half, 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1).to(x.dtype)
