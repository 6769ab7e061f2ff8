"""How the reference attention cuts a step into products of fixed shapes; `reference.py` says why.

Tiles of one request travel in pieces of up to PIECE_TILES, which share a copy of their keys. Pieces
with the same number of tiles form groups, small enough for the processor's cache: the requests that
decode are a few groups of one-tile pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tokenmill.attention.backend import AttentionSpec, CommonAttentionMetadata

PARTITION = 256
TILE_ROWS = 16
PIECE_TILES = 16
GROUP_VALUES = 1 << 18
"""Float32 values of keys, or of scores, that a group works on at a time."""


class _Piece(NamedTuple):
    """Neighbouring tiles of one request."""

    num_tiles: int
    num_keys: int
    """Keys that its last query sees, from position 0 on."""
    req: int
    first_tile: int


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys of a partition a query sees; float32 [pieces, 1, tiles, queries, 1, PARTITION]."""

    bias: torch.Tensor
    """0, or -inf where hidden."""
    visible: torch.Tensor
    """1, or 0 where hidden."""


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition of the keys, for the pieces of a group that reach it."""

    num_pieces: int
    """The first pieces of the group, which is sorted by falling number of keys."""
    cache_rows: torch.Tensor
    """int64 [num_pieces * num_kv_heads * blocks per partition], of the cache as
    [num_blocks * num_kv_heads, block_size * head_size]"""
    cut: list[tuple[int, int]]
    """Pieces whose keys end in this partition, and how many of its keys they have."""
    mask: Mask | None
    """None where all see all."""


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces of the same number of tiles."""

    num_pieces: int
    num_tiles: int
    tile_tokens: torch.Tensor
    """int64 [num_pieces * num_tiles * queries], the token of each query, or num_tokens for none"""
    filled: torch.Tensor
    """int64, the places in `tile_tokens` that hold a token"""
    partitions: list[Partition]


@dataclass(frozen=True, slots=True)
class ReferenceMetadata:
    """One step, ready for every layer."""

    groups: list[Group]
    kv_rows: torch.Tensor
    """int64 [num_tokens * num_kv_heads], of the cache as
    [num_blocks * num_kv_heads * block_size, head_size]"""


def queries_per_tile(spec: AttentionSpec) -> int:
    """Neighbouring positions in one tile."""
    return max(1, TILE_ROWS * spec.num_kv_heads // spec.num_heads)


class ReferenceMetadataBuilder:
    """Cuts a step into pieces, groups and partitions."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._queries = queries_per_tile(spec)

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

    def _group(self, common: CommonAttentionMetadata, pieces: list[_Piece]) -> Group:
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
        return Group(
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
    ) -> list[Partition]:
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
                Partition(
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

    def _mask(self, hidden: torch.Tensor) -> Mask:
        by_tile = hidden.reshape(len(hidden), 1, -1, self._queries, 1, PARTITION)
        zeros = torch.zeros(by_tile.shape)
        return Mask(zeros.masked_fill(by_tile, -torch.inf), (~by_tile).float())

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
