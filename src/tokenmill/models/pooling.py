"""What pooling asks of models, and the head that makes a classifier of a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from tokenmill.kernels.linear import linear
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot

SCORE = "score"
"""Name of a decoder's head for classes in its checkpoint."""


@runtime_checkable
class Classifier(Protocol):
    """A model that scores."""

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Hidden states, float32 [n, hidden_size], to logits, float32 [n, num_labels]."""
        ...


@runtime_checkable
class Encoder(Protocol):
    """A model that is told which tokens belong to a pair's second text."""

    def encode(
        self, input_ids: torch.Tensor, positions: torch.Tensor, token_types: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] of the flat batch.

        `input_ids` is int32, `positions` and `token_types` are int64, all [num_tokens].
        """
        ...


class DenseHead(nn.Module):
    """A small projection in float32, on torch's kernel: the same bits for any number of rows."""

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, dtype=torch.float32)
        self.bias = empty_parameter(out_features, dtype=torch.float32) if bias else None

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield parameter_slot(f"{prefix}.weight", self.weight)
        if self.bias is not None:
            yield parameter_slot(f"{prefix}.bias", self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project x, float32 [n, in_features], to [n, out_features]."""
        return linear(x, self.weight, self.bias)


def add_head(model: nn.Module, hidden_size: int, num_labels: int) -> None:
    """Give a model the head for classes that its checkpoint has, if it has none of its own."""
    if num_labels and not isinstance(model, Classifier):
        with next(model.parameters()).device:
            model.add_module(SCORE, DenseHead(hidden_size, num_labels, bias=False))


def classify(model: object, pooled: torch.Tensor) -> torch.Tensor:
    """Logits, float32 [n, num_labels], of hidden states, float32 [n, hidden_size]."""
    if isinstance(model, Classifier):
        return model.classify(pooled)
    assert isinstance(model, nn.Module)
    head: torch.Tensor = model.get_submodule(SCORE)(pooled)
    return head
