"""Activations of feed-forward blocks, and the cap on logits.

Each is spelled out with exp, + and /: torch's own silu, sigmoid and tanh have other bits at the end
of a tensor than in its middle, while these do not.
"""

from __future__ import annotations

from typing import Literal

import torch

Gate = Literal["silu", "gelu_tanh"]
"""`gelu_tanh` is the approximation of Hendrycks and Gimpel (2016)."""

_TWICE_SQRT_2_OVER_PI = 1.5957691216057308


def gated_activation(gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Compute activation(gate) * up [N, M] from gate_up [N, 2 * M], the gates in front.

    In float32, rounded once to the dtype of gate_up.
    """
    first, up = gate_up.float().chunk(2, dim=-1)
    return (_activated(first, gate) * up).to(gate_up.dtype)


def activation(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Compute silu(x) or gelu(x) of any shape, in float32, rounded once to x's dtype."""
    return _activated(x.float(), gate).to(x.dtype)


def soft_cap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Compute cap * tanh(logits / cap) of float32 logits; absolute error below cap * 3e-7."""
    falling = torch.exp(logits * (2.0 / cap)).add_(1.0).reciprocal_()
    return falling.mul_(-2.0 * cap).add_(cap)


def _activated(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    # (1 + tanh(u)) / 2 is the logistic function of 2 u, so both are x * logistic(something).
    argument = x if gate == "silu" else _TWICE_SQRT_2_OVER_PI * (x + 0.044715 * (x * x * x))
    return x / (torch.exp(-argument) + 1.0)
