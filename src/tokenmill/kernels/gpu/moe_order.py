"""(token, expert) pairs of a batch, sorted by expert on the device.

    count    the pairs of each expert
    place    the row of each pair, and the tiles that cover each expert's rows

One program an expert reads all pairs: no atomics, so the order is the same each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.launch import CompileCase, next_power_of_2

_PAIRS_PER_STEP = 1024


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """How many tiles the pairs can need: each expert's last may be in part empty."""
    return min(num_pairs, num_pairs // block_m + num_experts)


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """Which pair is which row: pairs of expert 0 first, each expert's in the order of tokens."""

    counts: torch.Tensor
    """int32 [num_experts]: pairs of each."""
    pair_of_row: torch.Tensor
    """int32 [num_tokens * k]: token * k + choice. Undefined behind the last row."""
    row_of_pair: torch.Tensor
    """int32 [num_tokens * k], -1 where the pair has no expert."""
    tiles: torch.Tensor
    """int32 [3, most tiles]: expert, -1 behind the last tile; first row; end of its rows."""
    block_m: int
    """Rows of a tile."""

    @classmethod
    def allocate(
        cls, num_tokens: int, k: int, num_experts: int, block_m: int, device: torch.device | str
    ) -> ExpertOrder:
        """Room for the order of so many tokens' pairs."""
        pairs = num_tokens * k
        tiles = most_tiles(pairs, num_experts, block_m)
        empty = partial(torch.empty, dtype=torch.int32, device=device)
        return cls(empty(num_experts), empty(pairs), empty(pairs), empty(3, tiles), block_m)


def align_experts(expert_of_pair: torch.Tensor, order: ExpertOrder) -> None:
    """Sort pairs by expert into `order`; expert_of_pair is int32 [num_tokens, k].

    An expert of -1 is none: a padded token's.
    """
    num_pairs, num_experts = expert_of_pair.numel(), len(order.counts)
    assert expert_of_pair.dtype == torch.int32
    assert expert_of_pair.is_contiguous()
    assert order.pair_of_row.shape == order.row_of_pair.shape == (num_pairs,)
    assert order.tiles.shape == (3, most_tiles(num_pairs, num_experts, order.block_m))
    if num_pairs == 0:
        return
    _count_kernel[(num_experts,)](
        expert_of_pair, order.counts, num_pairs, BLOCK=_PAIRS_PER_STEP, num_warps=4
    )
    _place_kernel[(num_experts + 1,)](
        expert_of_pair,
        order.counts,
        order.pair_of_row,
        order.row_of_pair,
        order.tiles,
        num_pairs,
        num_experts,
        order.tiles.shape[1],
        BLOCK=_PAIRS_PER_STEP,
        BLOCK_E=next_power_of_2(num_experts),
        BLOCK_M=order.block_m,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    expert_of_pair: tl.tensor, counts: tl.tensor, num_pairs: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program an expert: its pairs."""
    expert = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        experts = tl.load(expert_of_pair + pairs, mask=pairs < num_pairs, other=-1)
        total += (experts == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _place_kernel(
    expert_of_pair: tl.tensor,
    counts: tl.tensor,
    pair_of_row: tl.tensor,
    row_of_pair: tl.tensor,
    tiles: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    num_tiles: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    """One program an expert: rows and tiles of its pairs. The last: pairs and tiles without one."""
    expert = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    before = tl.load(counts + experts, mask=experts < tl.minimum(expert, num_experts), other=0)
    first_row = tl.sum(before, axis=0)
    first_tile = tl.sum((before + BLOCK_M - 1) // BLOCK_M, axis=0)
    if expert < num_experts:
        count = tl.load(counts + expert)
        row = first_row
        for start in range(0, num_pairs, BLOCK):
            pairs = start + tl.arange(0, BLOCK)
            chosen = tl.load(expert_of_pair + pairs, mask=pairs < num_pairs, other=-1)
            is_own = chosen == expert
            own = is_own.to(tl.int32)
            rows = row + tl.cumsum(own, axis=0) - 1
            tl.store(pair_of_row + rows, pairs, mask=is_own)
            tl.store(row_of_pair + pairs, rows, mask=is_own)
            row += tl.sum(own, axis=0)
        for tile in range(tl.cdiv(count, BLOCK_M)):
            place = tiles + first_tile + tile
            tl.store(place, expert)
            tl.store(place + num_tiles, first_row + tile * BLOCK_M)
            tl.store(place + 2 * num_tiles, first_row + count)
    else:
        for start in range(0, num_pairs, BLOCK):
            pairs = start + tl.arange(0, BLOCK)
            chosen = tl.load(expert_of_pair + pairs, mask=pairs < num_pairs, other=0)
            tl.store(row_of_pair + pairs, tl.full((BLOCK,), -1, tl.int32), mask=chosen < 0)
        for start in range(first_tile, num_tiles, BLOCK):
            empty = start + tl.arange(0, BLOCK)
            tl.store(tiles + empty, tl.full((BLOCK,), -1, tl.int32), mask=empty < num_tiles)


def compile_cases() -> list[CompileCase]:
    """Both kernels, for 128 experts."""
    types = {"expert_of_pair": "*i32", "counts": "*i32", "num_pairs": "i32"}
    return [
        CompileCase("moe count", _count_kernel, types, {"BLOCK": _PAIRS_PER_STEP}),
        CompileCase(
            "moe place",
            _place_kernel,
            {
                **types,
                "pair_of_row": "*i32",
                "row_of_pair": "*i32",
                "tiles": "*i32",
                "num_experts": "i32:16",
                "num_tiles": "i32",
            },
            {"BLOCK": _PAIRS_PER_STEP, "BLOCK_E": 128, "BLOCK_M": 64},
        ),
    ]
