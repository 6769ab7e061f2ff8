"""How matrix products are cut: segments of the sum, tiles of the result, and who merges them.

The sum along K of every element is cut into segments, by the shape of the weight alone. A segment
is one chain of matrix instructions from its first value to its last; segments are added in order.
So the bits of a row do not depend on how many rows there are, although the tiles do:

    few rows    a program a segment, so that a narrow weight is read by the whole card; partial sums
                go through a workspace, and the last program to arrive adds them, in order
    many rows   a program walks all segments and adds them in registers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import torch

from tokenmill.kernels.gpu.launch import cdiv

Instruction = Literal["wgmma", "mma", "fma"]
"""The matrix instruction: a warpgroup's (64 rows of the first operand) or a warp's (16), or none,
for float32. They need not round alike, so a product that is to be the same for any number of rows
keeps to one."""

SEGMENT_MULTIPLE = 128
"""Segments begin at multiples of the largest step along K, so that no step crosses into another."""

_FEWEST_PROGRAMS = 128
"""Fewer programs than this leave multiprocessors without work (an H200 has 132)."""
_SHORTEST_SEGMENT = 512
_MOST_SEGMENTS = 8
_COLUMNS_PER_PROGRAM = 64


class Tile(Protocol):
    """What the choice of a tile depends on."""

    @property
    def block_m(self) -> int: ...

    @property
    def block_n(self) -> int: ...

    @property
    def segments_in_grid(self) -> bool: ...


T = TypeVar("T", bound=Tile)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The part of a product that one program computes, and how."""

    block_m: int
    """Rows of x."""
    block_n: int
    """Rows of the weight: columns of the result."""
    block_k: int
    """Values along K that are loaded at a time."""
    num_warps: int
    num_stages: int
    """Steps along K that are in flight or in use, each block_k * (block_m + block_n) values."""
    weight_first: bool
    """The weight is the first operand of the matrix instruction, of which a warpgroup's takes 64
    rows: so few rows of x do not leave it idle."""
    segments_in_grid: bool
    """A program computes one segment, and not all."""
    group_m: int = 8
    """Row tiles that walk the weight together, so that its tiles are still in L2."""
    use_descriptors: bool = True
    """Tiles are fetched by the copy engine, where the tensors' alignment allows it."""
    most_imprecise: int = 0
    """See `ProductPlan`."""
    early_bytes: int = 0
    """Of a program's part of the weight; they are fetched to L2 while the kernel in front still
    runs (`overlap.py`). What is in the L2 by then was free; too much would drive out other things.
    """

    @property
    def instruction(self) -> Instruction:
        """What a product of 16-bit values in these tiles computes with, on a Hopper GPU."""
        first = self.block_n if self.weight_first else self.block_m
        return "wgmma" if first >= 64 and self.num_warps % 4 == 0 else "mma"


class Choice(NamedTuple, Generic[T]):
    """One tile of a table."""

    tile: T
    least_programs: int
    """It is taken if so many programs compute a product; 0 for the last resort."""


Table = tuple[tuple[int, tuple[Choice[T], ...]], ...]
"""(most rows of x, tiles from large to small) from few rows to many."""

ANY_ROWS = 1 << 62
ONE_WAVE = 112
"""Programs that keep most of the 132 multiprocessors of an H200 at work."""
HALF_WAVE = 67
EARLY_BYTES = 64 << 10
"""Where products wait for memory, not for the matrix units."""
TWO_WAVES = 192
"""Programs enough for two on many a multiprocessor: one loads while the other multiplies."""


def _few(block_m: int, block_n: int, block_k: int, warps: int, stages: int) -> TileConfig:
    return TileConfig(
        block_m, block_n, block_k, warps, stages, True, segments_in_grid=True,
        early_bytes=EARLY_BYTES if block_m <= 64 else 0,
    )  # fmt: skip


def _many(block_m: int, block_n: int, block_k: int, warps: int, stages: int) -> TileConfig:
    return TileConfig(block_m, block_n, block_k, warps, stages, False, segments_in_grid=False)


def _warp(block_m: int, block_n: int, block_k: int, stages: int) -> TileConfig:
    return TileConfig(block_m, block_n, block_k, 4, stages, False, segments_in_grid=True)


TILES: dict[Instruction, Table[TileConfig]] = {
    "wgmma": (
        (16, (Choice(_few(16, 64, 128, 4, 5), 0),)),
        (32, (Choice(_few(32, 64, 128, 4, 4), 0),)),
        (64, (Choice(_few(64, 128, 64, 4, 4), TWO_WAVES), Choice(_few(64, 64, 128, 4, 4), 0))),
        (128, (Choice(_few(128, 128, 64, 8, 3), TWO_WAVES), Choice(_few(128, 64, 64, 4, 4), 0))),
        (
            ANY_ROWS,
            (
                Choice(_many(256, 128, 64, 8, 4), ONE_WAVE),
                Choice(_many(128, 128, 64, 8, 4), HALF_WAVE),
                Choice(_few(128, 128, 64, 8, 3), 0),
            ),
        ),
    ),
    "mma": (
        (16, (Choice(_warp(16, 32, 128, 5), 0),)),
        (32, (Choice(_warp(32, 64, 128, 4), 0),)),
        (ANY_ROWS, (Choice(_many(32, 128, 64, 4, 4), 0),)),
    ),
    "fma": (
        (16, (Choice(_warp(16, 64, 32, 3), 0),)),
        (ANY_ROWS, (Choice(_many(64, 64, 32, 8, 3), 0),)),
    ),
}
"""As they were fastest on an H200. There wgmma and mma round alike, so that their tiles might be
mixed; nothing promises that of other GPUs."""


def choose_tile(
    num_rows: int, num_columns: int, num_segments: int, instruction: Instruction = "wgmma"
) -> TileConfig:
    """The tile for x [num_rows, K] and a weight [num_columns, K] in so many segments."""
    return pick_tile(TILES[instruction], num_rows, num_columns, num_segments)


def pick_tile(table: Table[T], num_rows: int, num_columns: int, num_segments: int) -> T:
    """The first tile for so many rows that gives the multiprocessors enough to do."""
    choices = next(choices for most_rows, choices in table if num_rows <= most_rows)
    for tile, least_programs in choices:
        programs = cdiv(num_rows, tile.block_m) * cdiv(num_columns, tile.block_n)
        if programs * (num_segments if tile.segments_in_grid else 1) >= least_programs:
            return tile
    raise AssertionError("a table's last choice takes any number of programs")


def tiles_of(table: Table[T]) -> list[T]:
    """All tiles of a table."""
    return [choice.tile for _, choices in table for choice in choices]


def choose_segments(num_columns: int, depth: int) -> int:
    """Into how many segments the sums of a product with a weight [num_columns, depth] are cut.

    Enough for every multiprocessor to read a part of the weight. Part of a result's definition:
    another number gives other bits.
    """
    segments = 1
    while (
        segments < _MOST_SEGMENTS
        and segments * cdiv(num_columns, _COLUMNS_PER_PROGRAM) < _FEWEST_PROGRAMS
        and depth >= 2 * segments * _SHORTEST_SEGMENT
    ):
        segments *= 2
    return segments


def segment_depth(depth: int, num_segments: int) -> int:
    """Values along K in a segment (in all but the last, which may be shorter)."""
    return max(1, cdiv(depth, num_segments * SEGMENT_MULTIPLE)) * SEGMENT_MULTIPLE


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """What a kernel is compiled for."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_segments: int
    segments_in_grid: bool
    weight_first: bool
    by_descriptor: bool
    is_even: bool
    """K is a multiple of block_k."""
    most_imprecise: int
    """Float8 products that are added in the matrix unit, which keeps few bits, before a sum goes to
    float32; 0 for other types."""
    overlaps: bool
    """The kernel may start before the one in front of it has ended."""
    early_bytes: int
    early_pieces: int
    """Into so many a row's early bytes are cut, so that each thread asks for one."""


def plan_product(
    tile: TileConfig, num_segments: int, depth: int, *, aligned: bool, overlaps: bool
) -> ProductPlan:
    """The constants of a product; `aligned` tensors can be fetched by the copy engine."""
    return ProductPlan(
        block_m=tile.block_m,
        block_n=tile.block_n,
        block_k=tile.block_k,
        group_m=tile.group_m,
        num_segments=num_segments,
        segments_in_grid=tile.segments_in_grid and num_segments > 1,
        weight_first=tile.weight_first,
        by_descriptor=tile.use_descriptors and aligned,
        is_even=depth % tile.block_k == 0,
        most_imprecise=tile.most_imprecise,
        overlaps=overlaps,
        early_bytes=tile.early_bytes if aligned and overlaps else 0,
        early_pieces=max(1, 32 * tile.num_warps // tile.block_n),
    )


@dataclass(frozen=True, slots=True)
class SplitWorkspace:
    """Where programs leave partial sums for each other; one a stream, as each launch uses it all.

    A launch leaves `arrivals` zero, as it found it.
    """

    partial: torch.Tensor
    """float32 [num_values]: tile after tile, its segments one behind the other."""
    arrivals: torch.Tensor
    """int32 [num_tiles], zero between launches: how many programs of a tile have written."""

    @classmethod
    def allocate(
        cls, device: torch.device | str, num_values: int = 9 << 20, num_tiles: int = 1 << 14
    ) -> SplitWorkspace:
        """A workspace that holds every tile the tables choose (36 MiB)."""
        return cls(
            torch.empty(num_values, dtype=torch.float32, device=device),
            torch.zeros(num_tiles, dtype=torch.int32, device=device),
        )

    def holds(self, num_tiles: int, num_segments: int, tile_values: int) -> bool:
        """Whether the partial sums of so many tiles find room."""
        return num_tiles <= len(self.arrivals) and num_tiles * num_segments * tile_values <= len(
            self.partial
        )
