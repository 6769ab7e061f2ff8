"""Which tiles the attention kernels use: a small table, to be tuned on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from tokenmill.kernels.gpu.launch import next_power_of_2

PARTITION = 256
"""Keys of a partition. Fixed for a model's lifetime: it decides about the bits of a result."""
PROGRAMS_PER_SM = 6
"""Of a split launch, at most: about twice as many as run at a time, so that they balance."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one kernel is cut and compiled."""

    block_m: int
    """Rows of a tile of queries, at least the query heads of a KV head."""
    block_n: int
    """Keys of a tile, a divisor of the partition."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Of a thread: fewer let more programs share a multiprocessor."""

    @property
    def launch_options(self) -> dict[str, int | None]:
        """Triton's options for a launch."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.max_registers,
        }


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """How attention is launched for one kind of layer."""

    split: TileConfig
    """Requests of at most `split.block_m // group` tokens; more tokens take the prefill kernel."""
    prefill: TileConfig
    exact: bool
    """Whether a token has the same bits in a prompt, in a piece of it, and decoded.

    Both kernels then walk alike, and their tiles have the same number of rows, or at least 64, so
    that the same matrix instructions do the sums."""
    partition: int = PARTITION
    programs_per_sm: int = PROGRAMS_PER_SM
    one_loop: bool = False
    """Whether a split program walks over neighbouring partitions in one loop, so that keys are
    fetched across their bounds. The bits are the same; to be measured."""

    def __post_init__(self) -> None:
        assert self.partition % self.split.block_n == 0
        assert self.partition % self.prefill.block_n == 0
        if self.exact:
            assert self.split.block_n == self.prefill.block_n
            rows = {self.split.block_m, self.prefill.block_m}
            assert len(rows) == 1 or min(rows) >= 64


@lru_cache(maxsize=64)
def choose_config(
    group: int,
    head_size: int,
    dtype: torch.dtype,
    *,
    exact: bool,
    max_split_query_len: int = 1,
    partition: int = PARTITION,
) -> AttentionConfig:
    """The tiles for layers of `group` query heads per KV head and queries of `dtype`.

    Requests of up to max_split_query_len tokens (1, and the drafts) take the split kernel at any
    rate; more do where its tiles have room.
    """
    rows = next_power_of_2(max(16, group * max_split_query_len))
    split_m = max(64, rows) if exact else rows
    block_d = next_power_of_2(head_size)
    if dtype == torch.float32:
        split = TileConfig(split_m, 32, num_warps=4, num_stages=2)
        prefill = TileConfig(max(64, next_power_of_2(group)), 32, num_warps=4, num_stages=2)
    elif block_d <= 128:
        split = TileConfig(split_m, 64, num_warps=4, num_stages=3)
        split = replace(split, max_registers=None if exact else 168)
        prefill = TileConfig(max(128, next_power_of_2(group)), 64, num_warps=8, num_stages=3)
    else:
        # Two states of 256 values a row take all registers of four warps and 64 rows.
        split = TileConfig(split_m, 64, num_warps=8 if exact else 4, num_stages=2)
        prefill_m = 64 if exact else 128
        prefill = TileConfig(max(prefill_m, next_power_of_2(group)), 64, num_warps=8, num_stages=2)
    return AttentionConfig(
        split, prefill, exact, partition, programs_per_sm=4 if exact else PROGRAMS_PER_SM
    )


def choose_latent_config(dtype: torch.dtype, *, partition: int = PARTITION) -> AttentionConfig:
    """The tiles for layers of latents: exact, so that there is one for all steps."""
    # Two states of 512 values a row take half of a multiprocessor's registers at 32 rows.
    if dtype == torch.float32:
        tile = TileConfig(16, 32, num_warps=8, num_stages=1)
    else:
        tile = TileConfig(32, 32, num_warps=8, num_stages=2)
    return AttentionConfig(tile, tile, True, partition, programs_per_sm=2)
