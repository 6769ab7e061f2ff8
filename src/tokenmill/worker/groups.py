"""Which attention layers prepare their steps together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.attention.backend import AttentionMetadataBuilder


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Attention layers that share metadata."""

    kv_group: int
    """Index of the KV cache group whose block table they use."""
    layer_names: tuple[str, ...]
    builder: AttentionMetadataBuilder
    supports_graphs: bool = False
    """Whether a step's launches may be captured in a CUDA graph."""
    causal: bool = True
    """Whether a token sees those before it only."""


def num_kv_groups(attention_groups: Sequence[AttentionGroup]) -> int:
    """Block tables that each request has."""
    return 1 + max(group.kv_group for group in attention_groups)
