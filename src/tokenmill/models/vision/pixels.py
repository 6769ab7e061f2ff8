"""Pixels as `features/multimodal/processors/pixels.py` sends them, to what towers read."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def pixel_values(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`pixels`, uint8 [images, height, width, channels], by way of `channel_values`, float32
    [channels, 256]: float32 [images, channels, height, width].
    """
    pixels, values = inputs["pixels"], inputs["channel_values"]
    channels = [values[channel][pixels[..., channel].int()] for channel in range(len(values))]
    return torch.stack(channels, dim=1)
