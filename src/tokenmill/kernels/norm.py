"""Root mean square normalisation (Zhang and Sennrich, 2019), and layer normalisation (Ba et al.,
2016).

Exact for any batch up to rows of 32,767 values: torch cuts a single longer row among threads.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute x / sqrt(mean(x ** 2) + eps) * weight along the last dimension.

    x is float32 [..., size], weight float32 [size]; the result has x's shape, float32.
    """
    mean_square = x.square().mean(-1, keepdim=True)
    return x / torch.sqrt(mean_square + eps) * weight


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Compute (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias along the last dimension.

    x is float32 [..., size], weight and bias float32 [size]; the result has x's shape, float32.
    """
    centred = x - x.mean(-1, keepdim=True)
    return rms_norm(centred, weight, eps) + bias
