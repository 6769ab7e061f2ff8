"""Activations of blocks without a gate, by the names that config.json files have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from tokenmill.errors import ConfigError, shown
from tokenmill.kernels.activation import activation
from tokenmill.kernels.gelu import gelu

Activation = Callable[[torch.Tensor], torch.Tensor]
"""Of any shape and dtype, elementwise; the bits of an element depend on it alone."""

_QUICK_GELU_SLOPE = 1.702


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute x * logistic(1.702 * x), in float32, rounded once to x's dtype.

    The other approximation of Hendrycks and Gimpel (2016), spelled out as in
    `kernels/activation.py`.
    """
    values = x.float()
    return (values / (torch.exp(values * -_QUICK_GELU_SLOPE) + 1.0)).to(x.dtype)


ACTIVATIONS: dict[str, Activation] = {
    "gelu": gelu,
    "gelu_new": partial(activation, gate="gelu_tanh"),
    "gelu_pytorch_tanh": partial(activation, gate="gelu_tanh"),
    "quick_gelu": quick_gelu,
    "silu": partial(activation, gate="silu"),
    "relu": torch.relu,
}


def read_activation(config: Mapping[str, Any], key: str, default: str = "gelu") -> Activation:
    """The one that `config[key]` names. Raises `ConfigError` for a name that is not known."""
    name = str(config.get(key) or default)
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: {key}={shown(name)} is not supported; these are:"
            f" {', '.join(ACTIVATIONS)}."
        )
    return ACTIVATIONS[name]
