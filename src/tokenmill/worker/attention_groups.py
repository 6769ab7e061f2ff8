"""Which attention layers prepare their steps together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.attention.backend import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from tokenmill.attention.items import ItemRuns, build_metadata


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
    item_builder: AttentionMetadataBuilder | None = None
    """For tokens of items, where they see each other in both directions."""

    def build(
        self, common: CommonAttentionMetadata, item_runs: ItemRuns | None
    ) -> AttentionMetadata:
        """Prepare a step for the group's layers."""
        return build_metadata(self.builder, self.item_builder, common, item_runs)


def num_kv_groups(attention_groups: Sequence[AttentionGroup]) -> int:
    """Block tables that each request has."""
    return 1 + max(group.kv_group for group in attention_groups)
