"""What the KV cache holds, in numbers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tokenmill.config.dtypes import kv_head_bytes


class KVCacheKind(enum.Enum):
    """What a group of layers keeps of a sequence."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CROSS = "cross"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one attention layer keeps per token."""

    num_kv_heads: int
    head_size: int
    dtype: str
    """`float32`, `bfloat16`, `float16`, or `int8` with a scale per token and head."""
    kind: KVCacheKind = KVCacheKind.FULL
    sliding_window: int | None = None
    """Tokens that a query sees, itself included; None sees all."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V in this layer."""
        return 2 * self.num_kv_heads * kv_head_bytes(self.head_size, self.dtype)


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share one block table, since they keep the same of each sequence."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The pool: `num_blocks` blocks of `block_size` tokens, in each of the groups' layers.

    Block 0 is the null block: never handed out, stands for blocks that are not needed.
    """

    num_blocks: int
    block_size: int
    groups: tuple[KVCacheGroup, ...]

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * sum(
            len(group.layer_names) * group.spec.bytes_per_token for group in self.groups
        )

    @property
    def num_usable_tokens(self) -> int:
        """Tokens that fit beside the null block."""
        return (self.num_blocks - 1) * self.block_size
