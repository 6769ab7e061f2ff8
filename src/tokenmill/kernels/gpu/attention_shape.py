"""What attention's kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tokenmill.kernels.gpu.attention_config import AttentionConfig
from tokenmill.kernels.gpu.launch import next_power_of_2


@dataclass(frozen=True, slots=True)
class KernelShape:
    """Everything about a launch that is fixed when its kernel is compiled."""

    num_kv_heads: int
    group: int
    """Query heads per KV head."""
    head_size: int
    """Of values, and of keys but for their rotated part."""
    rotated: int
    """Elements of a key in front of its value, of latents; 0 where values are apart from keys."""
    block_d: int
    """head_size, rounded up to a power of two."""
    block_size: int
    """Tokens of a cache block."""
    block_stride: int
    """Elements of the cache between two blocks."""
    window: int
    """Tokens that a query sees, itself included; 0 if it sees all."""
    causal: bool
    has_soft_cap: bool
    has_sinks: bool
    partition: int
    """Keys of a partition, a multiple of block_n."""
    block_m: int
    """Rows of a tile of queries."""
    block_n: int
    """Keys of a tile."""
    in_partitions: bool
    """Whether a tile of queries walks partition by partition."""
    one_loop: bool
    """Whether a program walks over neighbouring partitions in one loop; the bits are the same."""

    @property
    def tile_tokens(self) -> int:
        """Query tokens of a tile."""
        return self.block_m // self.group

    @property
    def key_size(self) -> int:
        """Elements of a key, and of a query."""
        return self.rotated + self.head_size

    @property
    def block_r(self) -> int:
        """The rotated part, rounded up to a power of two that a product takes."""
        return max(16, 1 << (self.rotated - 1).bit_length())

    @property
    def key_stride(self) -> int:
        """Elements of the cache between the keys of two KV heads."""
        return 0 if self.rotated else self.head_size

    @property
    def token_stride(self) -> int:
        """Elements of the cache between the keys of two tokens."""
        return self.key_size if self.rotated else self.num_kv_heads * self.head_size

    @property
    def value_offset(self) -> int:
        """Elements of the cache between the keys and the values of a block."""
        return self.block_size * self.token_stride


@lru_cache(maxsize=64)
def kernel_shapes(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    block_stride: int,
    sliding_window: int | None,
    causal: bool,
    has_soft_cap: bool,
    has_sinks: bool,
    config: AttentionConfig,
    rotated: int = 0,
) -> tuple[KernelShape, KernelShape]:
    """What the (split, prefill) kernels are compiled for. With `rotated`, see `KernelShape`."""

    def shape(block_m: int, block_n: int, in_partitions: bool) -> KernelShape:
        return KernelShape(
            num_kv_heads=num_kv_heads,
            group=num_heads // num_kv_heads,
            head_size=head_size,
            rotated=rotated,
            block_d=max(16, next_power_of_2(head_size)),
            block_size=block_size,
            block_stride=block_stride,
            window=sliding_window or 0,
            causal=causal,
            has_soft_cap=has_soft_cap,
            has_sinks=has_sinks,
            partition=config.partition,
            block_m=block_m,
            block_n=block_n,
            in_partitions=in_partitions,
            one_loop=config.one_loop,
        )

    split, prefill = config.split, config.prefill
    return (
        shape(split.block_m, split.block_n, True),
        shape(prefill.block_m, prefill.block_n, config.exact),
    )
