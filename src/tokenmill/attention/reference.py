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

Tiles of one request travel in pieces of up to PIECE_TILES, which share a copy of their keys. Pieces
with the same number of tiles form groups, small enough for the processor's cache: the requests that
decode are a few groups of one-tile pieces.

Cache layout: [2, num_blocks, num_kv_heads, block_size, head_size], K first, so that a partition of
one head is a few contiguous runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tokenmill.attention.backend import (
    AttentionMetadata,
    AttentionSpec,
    CacheLimits,
    CommonAttentionMetadata,
    Rotation,
)
from tokenmill.attention.reasons import dtype_reasons, shape_reasons
from tokenmill.kernels.rotary import apply_rotary

PARTITION = 256
TILE_ROWS = 16
PIECE_TILES = 16
GROUP_VALUES = 1 << 18
"""Float32 values of keys, or of scores, that a group works on at a time."""
MIN_EXPONENT = -60.0
"""Weights under exp(-60) of the largest are below float32's resolution; torch's exp is slow near
its underflow."""

_DTYPES = ("float32", "bfloat16", "float16")


class _Piece(NamedTuple):
    """Neighbouring tiles of one request."""

    num_tiles: int
    num_keys: int
    """Keys that its last query sees, from position 0 on."""
    req: int
    first_tile: int


@dataclass(frozen=True, slots=True)
class _Mask:
    """Which keys of a partition a query sees; float32 [pieces, 1, tiles, queries, 1, PARTITION]."""

    bias: torch.Tensor
    """0, or -inf where hidden."""
    visible: torch.Tensor
    """1, or 0 where hidden."""


@dataclass(frozen=True, slots=True)
class _Partition:
    """One partition of the keys, for the pieces of a group that reach it."""

    num_pieces: int
    """The first pieces of the group, which is sorted by falling number of keys."""
    cache_rows: torch.Tensor
    """int64 [num_pieces * num_kv_heads * blocks per partition], of the cache as
    [num_blocks * num_kv_heads, block_size * head_size]"""
    cut: list[tuple[int, int]]
    """Pieces whose keys end in this partition, and how many of its keys they have."""
    mask: _Mask | None
    """None where all see all."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Pieces of the same number of tiles."""

    num_pieces: int
    num_tiles: int
    tile_tokens: torch.Tensor
    """int64 [num_pieces * num_tiles * queries], the token of each query, or num_tokens for none"""
    filled: torch.Tensor
    """int64, the places in `tile_tokens` that hold a token"""
    partitions: list[_Partition]


@dataclass(frozen=True, slots=True)
class ReferenceMetadata:
    """One step, ready for every layer."""

    groups: list[_Group]
    kv_rows: torch.Tensor
    """int64 [num_tokens * num_kv_heads], of the cache as
    [num_blocks * num_kv_heads * block_size, head_size]"""


class ReferenceBackend:
    """The plain path that every faster backend is compared with."""

    name = "reference"
    supports_graphs = False

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        reasons = [*dtype_reasons(spec, _DTYPES), *shape_reasons(spec)]
        if spec.device != "cpu":
            reasons.append(f"runs on a CPU, where it cuts steps into pieces, not on {spec.device}")
        if spec.has_sinks:
            reasons.append("it has no attention sinks")
        if PARTITION % spec.block_size:
            reasons.append(f"block_size {spec.block_size} does not divide {PARTITION}")
        return reasons

    def get_kv_cache_shape(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        kv_dtype: str | None = None,
    ) -> tuple[int, ...]:
        return (2, num_blocks, num_kv_heads, block_size, head_size)

    def make_metadata_builder(
        self, spec: AttentionSpec, limits: CacheLimits
    ) -> ReferenceMetadataBuilder:
        return ReferenceMetadataBuilder(spec)

    def make_impl(self, spec: AttentionSpec) -> ReferenceImpl:
        return ReferenceImpl(spec)


def _queries_per_tile(spec: AttentionSpec) -> int:
    return max(1, TILE_ROWS * spec.num_kv_heads // spec.num_heads)


class ReferenceMetadataBuilder:
    """Cuts a step into pieces, groups and partitions."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._queries = _queries_per_tile(spec)

    def build(self, common: CommonAttentionMetadata) -> ReferenceMetadata:
        pieces = sorted(self._pieces(common), reverse=True)
        groups = [
            self._group(common, batch)
            for num_tiles, same in itertools.groupby(pieces, key=lambda piece: piece.num_tiles)
            for batch in _batched(list(same), self._pieces_per_group(num_tiles))
        ]
        return ReferenceMetadata(groups, self._kv_rows(common.slot_mapping))

    def _pieces(self, common: CommonAttentionMetadata) -> Iterator[_Piece]:
        starts = common.query_start_loc.tolist()
        for req, seq_len in enumerate(common.seq_lens.tolist()):
            query_len = starts[req + 1] - starts[req]
            tile = (seq_len - query_len) // self._queries
            end = -(-seq_len // self._queries) if query_len else tile
            while tile < end:
                piece_end = min((tile // PIECE_TILES + 1) * PIECE_TILES, end)
                num_keys = min(piece_end * self._queries, seq_len) if common.causal else seq_len
                yield _Piece(piece_end - tile, num_keys, req, tile)
                tile = piece_end

    def _pieces_per_group(self, num_tiles: int) -> int:
        spec = self._spec
        keys = spec.num_kv_heads * PARTITION * spec.head_size
        scores = spec.num_heads * num_tiles * self._queries * PARTITION
        return max(1, GROUP_VALUES // max(keys, scores))

    def _group(self, common: CommonAttentionMetadata, pieces: list[_Piece]) -> _Group:
        num_tiles = pieces[0].num_tiles
        reqs = torch.tensor([piece.req for piece in pieces])
        starts = common.query_start_loc[reqs, None].long()
        query_lens = common.query_start_loc[reqs + 1, None] - starts
        first_positions = common.seq_lens[reqs, None] - query_lens
        first_tiles = torch.tensor([[piece.first_tile] for piece in pieces])
        positions = first_tiles * self._queries + torch.arange(num_tiles * self._queries)
        offsets = positions - first_positions
        is_token = (offsets >= 0) & (offsets < query_lens)
        tokens = torch.where(is_token, starts + offsets, common.num_tokens)
        return _Group(
            num_pieces=len(pieces),
            num_tiles=num_tiles,
            tile_tokens=tokens.flatten(),
            filled=is_token.flatten().nonzero().squeeze(1),
            partitions=self._partitions(common, pieces, reqs, positions),
        )

    def _partitions(
        self,
        common: CommonAttentionMetadata,
        pieces: list[_Piece],
        reqs: torch.Tensor,
        positions: torch.Tensor,
    ) -> list[_Partition]:
        """The partitions of one group; `positions` is [pieces, queries of all tiles]."""
        num_keys = [piece.num_keys for piece in pieces]
        blocks = self._used_blocks(common.block_table[reqs].long(), num_keys)
        first_key = 0
        if self._spec.sliding_window is not None:
            first_key = max(0, int(positions.min()) - self._spec.sliding_window + 1)
        partitions = []
        for start in range(first_key // PARTITION * PARTITION, num_keys[0], PARTITION):
            active = sum(count > start for count in num_keys)
            hidden = self._hidden(start, num_keys[:active], positions[:active], common.causal)
            partitions.append(
                _Partition(
                    num_pieces=active,
                    cache_rows=self._cache_rows(blocks[:active], start),
                    cut=[
                        (piece, count - start)
                        for piece, count in enumerate(num_keys[:active])
                        if count - start < PARTITION
                    ],
                    mask=self._mask(hidden) if bool(hidden.any()) else None,
                )
            )
        return partitions

    def _hidden(
        self, start: int, num_keys: list[int], positions: torch.Tensor, causal: bool
    ) -> torch.Tensor:
        """Keys that a query does not see, bool [pieces, queries of all tiles, PARTITION]."""
        keys = torch.arange(start, start + PARTITION)
        positions = positions[:, :, None]
        hidden = (keys >= torch.tensor(num_keys)[:, None, None]).expand(-1, positions.shape[1], -1)
        if causal:
            hidden = hidden | (keys > positions)
        if self._spec.sliding_window is not None:
            hidden = hidden | (keys <= positions - self._spec.sliding_window)
        return hidden

    def _mask(self, hidden: torch.Tensor) -> _Mask:
        by_tile = hidden.reshape(len(hidden), 1, -1, self._queries, 1, PARTITION)
        zeros = torch.zeros(by_tile.shape)
        return _Mask(zeros.masked_fill(by_tile, -torch.inf), (~by_tile).float())

    def _used_blocks(self, blocks: torch.Tensor, num_keys: list[int]) -> torch.Tensor:
        """Block tables of whole partitions, with the null block where no key is used."""
        width = -(-num_keys[0] // PARTITION) * (PARTITION // self._spec.block_size)
        blocks = torch.nn.functional.pad(blocks, (0, width - blocks.shape[1]))
        starts = torch.arange(width) * self._spec.block_size
        return torch.where(starts < torch.tensor(num_keys)[:, None], blocks, 0)

    def _cache_rows(self, blocks: torch.Tensor, start: int) -> torch.Tensor:
        size, heads = self._spec.block_size, self._spec.num_kv_heads
        first = start // size
        part = blocks[:, None, first : first + PARTITION // size]
        return (part * heads + torch.arange(heads)[:, None]).flatten()

    def _kv_rows(self, slots: torch.Tensor) -> torch.Tensor:
        size, heads = self._spec.block_size, self._spec.num_kv_heads
        block, offset = slots[:, None] // size, slots[:, None] % size
        return ((block * heads + torch.arange(heads)) * size + offset).flatten()


def _batched(pieces: list[_Piece], size: int) -> Iterator[list[_Piece]]:
    for start in range(0, len(pieces), size):
        yield pieces[start : start + size]


class ReferenceImpl:
    """One layer's attention."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._queries = _queries_per_tile(spec)
        self._heads_per_kv_head = spec.num_heads // spec.num_kv_heads

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
        for cache, new in zip(kv_cache, (key, value), strict=True):
            rows = new.reshape(-1, self._spec.head_size).to(cache.dtype)
            cache.view(-1, self._spec.head_size).index_copy_(0, metadata.kv_rows, rows)

    def _attend_groups(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: ReferenceMetadata
    ) -> torch.Tensor:
        """Output [num_tokens, num_heads, head_size] of query of that shape."""
        out = torch.empty_like(query)
        scaled = query.float() * self._spec.scale
        padded = torch.cat([scaled, scaled.new_zeros(1, *query.shape[1:])])
        for group in metadata.groups:
            rows = self._attend(padded, kv_cache, group)[group.filled]
            out.index_copy_(0, group.tile_tokens[group.filled], rows.to(query.dtype))
        return out

    def _attend(self, query: torch.Tensor, kv_cache: torch.Tensor, group: _Group) -> torch.Tensor:
        """Output [num_pieces * num_tiles * queries, num_heads, head_size] of one group."""
        heads, size = self._spec.num_kv_heads, self._spec.head_size
        # [pieces, tiles, queries, KV heads, heads per KV head, size]: a tile's rows side by side
        shape = (group.num_pieces, group.num_tiles, self._queries, heads, -1, size)
        tiles = query[group.tile_tokens].view(shape).permute(0, 3, 1, 2, 4, 5)
        tiles = tiles.reshape(group.num_pieces * heads, group.num_tiles, -1, size)
        peak = tiles.new_full((*tiles.shape[:-1], 1), torch.finfo(torch.float32).min)
        total = torch.zeros_like(peak)
        out = torch.zeros_like(tiles)
        for partition in group.partitions:
            n = partition.num_pieces * heads
            key, value = (self._read(cache, partition) for cache in kv_cache)
            self._fold(tiles[:n], key, value, partition.mask, peak[:n], total[:n], out[:n])
        out /= total
        out = out.view(group.num_pieces, heads, group.num_tiles, self._queries, -1, size)
        return out.permute(0, 2, 3, 1, 4, 5).reshape(-1, self._spec.num_heads, size)

    def _read(self, cache: torch.Tensor, partition: _Partition) -> torch.Tensor:
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
        mask: _Mask | None,
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
