"""The attention layer: RoPE, KV write, attention through the backend that the runner bound."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from tokenmill.attention.backend import AttentionImpl, AttentionSpec, TakesSinks
from tokenmill.attention.forward_context import get_attention_metadata
from tokenmill.attention.items import ItemMetadata, attend_items
from tokenmill.contracts.kv_cache import KVCacheKind, KVCacheSpec
from tokenmill.layers.parallel_linear import rows_slot
from tokenmill.layers.rope import RotaryEmbedding
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot
from tokenmill.parallel.shares import Share


class Attention(nn.Module):
    """Grouped-query attention over the paged cache.

    The runner calls `bind` once with a backend's implementation and the layer's part of the pool.
    """

    def __init__(
        self,
        layer_name: str,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        rotary: RotaryEmbedding | None,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        has_sinks: bool = False,
        causal: bool = True,
        value_offset: int | None = None,
        heads: Share | None = None,
    ) -> None:
        """`heads` are those of the model that are here, by default all. With `has_sinks`, each has
        a score without a value in its softmax, a weight. With
        `value_offset`, values are those of the keys from there on, and are not stored.
        """
        super().__init__()
        self.layer_name = layer_name
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.scale = scale
        self.rotary = rotary
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap
        self.causal = causal
        self.value_offset = value_offset
        self.heads = heads or Share(num_heads, 0, num_heads)
        self.sinks = empty_parameter(num_heads, dtype=torch.float32) if has_sinks else None
        self._impl: AttentionImpl | None = None
        self._item_impl: AttentionImpl | None = None
        self._kv_cache: torch.Tensor | None = None

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        if self.sinks is not None:
            slot = parameter_slot(f"{prefix.rpartition('.')[0]}.sinks", self.sinks)
            yield rows_slot(slot, [self.heads])

    def spec(self, dtype: str, block_size: int) -> AttentionSpec:
        """What this layer asks of an attention backend."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scale=self.scale,
            dtype=dtype,
            block_size=block_size,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            causal=self.causal,
            has_sinks=self.sinks is not None,
            value_offset=self.value_offset,
        )

    def kv_cache_spec(self, dtype: str) -> KVCacheSpec:
        """What this layer keeps per token."""
        return KVCacheSpec(
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=dtype,
            kind=KVCacheKind.SLIDING_WINDOW if self.sliding_window else KVCacheKind.FULL,
            sliding_window=self.sliding_window,
            stores_values=self.value_offset is None,
        )

    def bind(
        self, impl: AttentionImpl, kv_cache: torch.Tensor, item_impl: AttentionImpl | None = None
    ) -> None:
        """Attach the backend's implementation and this layer's cache tensor; where tokens of items
        see each other in both directions, an implementation for that, too.
        """
        if self.sinks is not None:
            assert isinstance(impl, TakesSinks)
            impl.sinks = self.sinks
        self._impl, self._item_impl = impl, item_impl
        self._kv_cache = kv_cache

    @property
    def bound(self) -> tuple[AttentionImpl, torch.Tensor]:
        """What `bind` has attached."""
        assert self._impl is not None, "bind comes first"
        assert self._kv_cache is not None
        return self._impl, self._kv_cache

    def forward(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Attend from query [N, num_heads * head_size]: [N, num_heads * value_size].

        Key and value are [N, num_kv_heads * head_size]. None of them is rotated yet. Where values
        are parts of keys, `value` is the key.
        """
        if self._impl is None or self._kv_cache is None:
            raise RuntimeError(f"Attention layer {self.layer_name!r} has no KV cache: call bind.")
        metadata = get_attention_metadata(self.layer_name)
        rotation = None if self.rotary is None else self.rotary.at(positions)
        step = query, key, value, rotation, self._kv_cache
        if not isinstance(metadata, ItemMetadata):
            return self._impl.forward(*step, metadata)
        assert self._item_impl is not None
        out = self._impl.forward(*step, metadata.causal)
        attend_items(self._item_impl, *step, metadata, out)
        return out
