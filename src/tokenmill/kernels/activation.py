"""Gated activations."""

from __future__ import annotations

import torch


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up [N, M] from gate_up [N, 2 * M], the gates in front; dtype is kept.

    Computed in float32 and rounded once. Spelled out, because torch's own silu and sigmoid have
    other bits at the end of a tensor than in its middle, while exp, + and / do not.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (torch.exp(-gate) + 1.0) * up).to(gate_up.dtype)
