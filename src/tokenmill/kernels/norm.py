"""Root mean square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute x / sqrt(mean(x ** 2) + eps) * weight along the last dimension.

    x is float32 [N, hidden_size], weight float32 [hidden_size]; so is the result. Exact for
    any batch up to a hidden_size of 32,767: torch cuts a single longer row among threads.
    """
    mean_square = x.square().mean(-1, keepdim=True)
    return x / torch.sqrt(mean_square + eps) * weight
