"""Attention in plain torch, with the same bits for any batching and chunking.

Every product has one shape, whatever the batch:

    tile         about TILE_ROWS rows of queries: neighbouring positions, from a multiple of their
                 number on, times the query heads that share a KV head
    partition    PARTITION keys, from a multiple of it on

    positions     0         5         10        15        20
                  |  tile 0 |  tile 1 |  tile 2 |  tile 3 |
    this step                    [.............]             tiles 1 and 2, other rows are zeros

A tile meets its partitions in order; each adds to a running maximum, sum and output in float32
(online softmax; Milakov and Gimelshein, 2018). A row's place in its tile follows from its position,
so a query computes the same alone, in a prompt, or in a batch.

`reference_plan.py` cuts a step into groups of tiles and their partitions.

Cache layout: [2, num_blocks, num_kv_heads, block_size, head_size], K first, so that a partition of
one head is a few contiguous runs. Where values are parts of keys, there is only K.
"""

from __future__ import annotations

import torch

from tokenmill.attention.backend import (
    AttentionMetadata,
    AttentionSpec,
    CacheLimits,
    Rotation,
)
from tokenmill.attention.reasons import dtype_reasons, shape_reasons
from tokenmill.attention.reference_plan import (
    PARTITION,
    Group,
    Mask,
    Partition,
    ReferenceMetadata,
    ReferenceMetadataBuilder,
    queries_per_tile,
)
from tokenmill.kernels.rotary import apply_rotary

MIN_EXPONENT = -60.0
"""Weights under exp(-60) of the largest are below float32's resolution; torch's exp is slow near
its underflow."""

_DTYPES = ("float32", "bfloat16", "float16")


class ReferenceBackend:
    """The plain path that every faster backend is compared with."""

    name = "reference"
    supports_graphs = False

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        reasons = [*dtype_reasons(spec, _DTYPES), *shape_reasons(spec)]
        if spec.device != "cpu":
            reasons.append(f"runs on a CPU, where it cuts steps into pieces, not on {spec.device}")
        if PARTITION % spec.block_size:
            reasons.append(f"block_size {spec.block_size} does not divide {PARTITION}")
        return reasons

    def get_kv_cache_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        parts = 2 if spec.value_offset is None else 1
        return (parts, num_blocks, spec.num_kv_heads, spec.block_size, spec.head_size)

    def make_metadata_builder(
        self, spec: AttentionSpec, limits: CacheLimits
    ) -> ReferenceMetadataBuilder:
        return ReferenceMetadataBuilder(spec)

    def make_impl(self, spec: AttentionSpec) -> ReferenceImpl:
        return ReferenceImpl(spec)


class ReferenceImpl:
    """One layer's attention."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._queries = queries_per_tile(spec)
        self._heads_per_kv_head = spec.num_heads // spec.num_kv_heads
        self.sinks: torch.Tensor | None = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        assert isinstance(metadata, ReferenceMetadata)
        assert self._spec.has_sinks == (self.sinks is not None)
        size = self._spec.head_size
        q, k, v = (x.reshape(len(x), -1, size) for x in (query, key, value))
        if rotation is not None:
            cos, sin = rotation.cos[rotation.positions], rotation.sin[rotation.positions]
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        self._write_kv(k, v, kv_cache, metadata)
        return self._attend_groups(q, kv_cache, metadata).flatten(1)

    def _write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: ReferenceMetadata,
    ) -> None:
        for cache, new in zip(kv_cache, (key, value), strict=False):  # V may not be there
            rows = new.reshape(-1, self._spec.head_size).to(cache.dtype)
            cache.view(-1, self._spec.head_size).index_copy_(0, metadata.kv_rows, rows)

    def _attend_groups(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: ReferenceMetadata
    ) -> torch.Tensor:
        """Output [num_tokens, num_heads, value_size] of query [..., head_size]."""
        out = query.new_empty(*query.shape[:2], self._spec.value_size)
        scaled = query.float() * self._spec.scale
        padded = torch.cat([scaled, scaled.new_zeros(1, *query.shape[1:])])
        for group in metadata.groups:
            rows = self._attend(padded, kv_cache, group)[group.filled]
            out.index_copy_(0, group.tile_tokens[group.filled], rows.to(query.dtype))
        return out

    def _attend(self, query: torch.Tensor, kv_cache: torch.Tensor, group: Group) -> torch.Tensor:
        """Output [num_pieces * num_tiles * queries, num_heads, value_size] of one group."""
        heads, size = self._spec.num_kv_heads, self._spec.head_size
        # [pieces, tiles, queries, KV heads, heads per KV head, size]: a tile's rows side by side
        shape = (group.num_pieces, group.num_tiles, self._queries, heads, -1, size)
        tiles = query[group.tile_tokens].view(shape).permute(0, 3, 1, 2, 4, 5)
        tiles = tiles.reshape(group.num_pieces * heads, group.num_tiles, -1, size)
        peak, total = self._start(tiles.shape[:-1])
        out = tiles.new_zeros(*tiles.shape[:-1], self._spec.value_size)
        for partition in group.partitions:
            n = partition.num_pieces * heads
            key, *stored = (self._read(cache, partition) for cache in kv_cache)
            value = stored[0] if stored else key[..., self._spec.value_offset :].contiguous()
            self._fold(tiles[:n], key, value, partition.mask, peak[:n], total[:n], out[:n])
        out /= total
        value_size = self._spec.value_size
        out = out.view(group.num_pieces, heads, group.num_tiles, self._queries, -1, value_size)
        return out.permute(0, 2, 3, 1, 4, 5).reshape(-1, self._spec.num_heads, value_size)

    def _start(self, rows: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Maximum and sum of each row before its first key, float32 [*rows, 1].

        A sink is a score without a value: it counts in the sum and adds nothing to the output.
        """
        if self.sinks is None:
            peak = torch.full((*rows, 1), torch.finfo(torch.float32).min)
            return peak, torch.zeros_like(peak)
        heads = self.sinks.view(1, self._spec.num_kv_heads, 1, 1, self._heads_per_kv_head)
        by_head = heads.expand(rows[0] // self._spec.num_kv_heads, -1, rows[1], self._queries, -1)
        peak = by_head.reshape(*rows, 1).clone()
        return peak, torch.ones_like(peak)

    def _read(self, cache: torch.Tensor, partition: Partition) -> torch.Tensor:
        """K or V of a partition, float32 [num_pieces * num_kv_heads, PARTITION, head_size].

        Zero where a piece has no keys: a block that was never written there may hold NaN.
        """
        heads, size = self._spec.num_kv_heads, self._spec.head_size
        rows = cache.view(-1, self._spec.block_size * size).index_select(0, partition.cache_rows)
        found = rows.float().view(partition.num_pieces, heads, PARTITION, size)
        for piece, num_keys in partition.cut:
            found[piece, :, num_keys:] = 0.0
        return found.view(-1, PARTITION, size)

    def _fold(
        self,
        tiles: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Mask | None,
        peak: torch.Tensor,
        total: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Add one partition to the running softmax, in place.

        A partition that is all hidden leaves the bits as they are: it adds zeros and scales by one.
        """
        scores = _tile_product(tiles, key.transpose(1, 2))
        heads, shared = self._spec.num_kv_heads, self._heads_per_kv_head
        by_head = scores.view(-1, heads, tiles.shape[1], self._queries, shared, PARTITION)
        cap = self._spec.logits_soft_cap
        if cap is not None:
            scores.div_(cap).tanh_().mul_(cap)
        if mask is not None:
            by_head.add_(mask.bias)
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_peak).clamp_(min=MIN_EXPONENT).exp_()
        if mask is not None:
            by_head.mul_(mask.visible)
        rescale = peak.sub(new_peak).clamp_(min=MIN_EXPONENT).exp_()
        total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
        out.mul_(rescale).add_(_tile_product(weights, value))
        peak.copy_(new_peak)


def _tile_product(tiles: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Multiply tiles [n, num_tiles, R, K] by matrix [n, K, C], each in a product of its own."""
    n, num_tiles, rows, _ = tiles.shape
    out = tiles.new_empty(n, num_tiles, rows, matrix.shape[-1])
    if num_tiles == 1:
        torch.bmm(tiles[:, 0], matrix, out=out[:, 0])
        return out
    for index in range(n):
        torch.bmm(tiles[index], matrix[index].expand(num_tiles, -1, -1), out=out[index])
    return out
